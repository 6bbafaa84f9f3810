"""cove-setup: puts settings and the recipe of the sandbox's image into a project, and never overwrites what its owner changed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

NEXT = """
Next:
  1. Start a server:              cove serve
  2. Look at .env                 (COVE_URL and COVE_API_KEY: what `cove serve` printed)
  3. Build the image, if you want packages of your own:
                                  cove image build -t sandbox:latest -f Dockerfile .
     Without it sandboxes start from the server's python template.
  4. Talk to it:                  cove-chat"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="cove-setup", description="Write settings and the image's recipe into a directory.")
    parser.add_argument("directory", nargs="?", type=Path, default=Path("."), help="default is the current one")
    args = parser.parse_args(argv)
    try:
        args.directory.mkdir(parents=True, exist_ok=True)
        for line in install(args.directory):
            print(line)
    except OSError as err:
        print(f"cove-setup: {err}", file=sys.stderr)
        return 1
    print(NEXT)
    return 0


def install(directory: Path) -> Iterator[str]:
    """Write every file that is not there, and tell of each what was done."""
    for name, source in sorted(_sources(files(__package__) / "files", "")):
        yield _write(directory / name, name, source.read_text())
    yield _write(directory / ".env", ".env", (files(__package__) / "files" / "example.env").read_text(), mine=True)


def _sources(root: Traversable, prefix: str) -> Iterator[tuple[str, Traversable]]:
    for each in root.iterdir():
        if each.is_dir():
            yield from _sources(each, f"{prefix}{each.name}/")
        else:
            yield prefix + each.name, each


def _write(target: Path, name: str, text: str, mine: bool = False) -> str:
    """Write a file. One that its owner changed stays, and the new one is put beside it; settings of the owner's own just stay."""
    if target.is_file() and target.read_text() == text:
        return f"✓ {name} is up to date"
    if target.exists() or target.is_symlink():
        if mine:
            return f"✓ {name} is yours and stays"
        beside = target.with_name(target.name + ".new")
        beside.write_text(text)
        return f"✗ {name} has changes of yours and stays; the new one is {beside.name}"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)
    return f"✓ {name} written"
