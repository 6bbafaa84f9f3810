"""The package as it is published."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

PYTHON = Path(__file__).parents[2]
BUILD = "import sys; from setuptools import build_meta as b; out = sys.argv[1]; b.build_wheel(out); b.build_sdist(out)"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source, out = tmp_path_factory.mktemp("source") / "python", tmp_path_factory.mktemp("dist")
    shutil.copytree(PYTHON, source, ignore=shutil.ignore_patterns("tests", "__pycache__", "*.egg-info", "build"))
    done = subprocess.run([sys.executable, "-c", BUILD, str(out)], cwd=source, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    return out


def test_S1_1_the_wheel_can_be_imported(built: Path, tmp_path: Path) -> None:
    wheel, = built.glob("*.whl")
    where = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(where)
    code = f"import sys; sys.path.insert(0, {str(where)!r}); import cove.deepagents as d, cove; print(d.CoveSandbox.__name__, cove.__file__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env={"PATH": "/usr/bin"}, capture_output=True, text=True, timeout=600)
    assert done.stdout.strip() == f"CoveSandbox {where}/cove/__init__.py", done.stderr


def test_S1_56_wheel_and_sdist_have_types_licence_and_entry_points(built: Path) -> None:
    wheel, = built.glob("*.whl")
    sdist, = built.glob("*.tar.gz")
    names = zipfile.ZipFile(wheel).namelist()
    assert "cove/py.typed" in names and not [n for n in names if "tests" in n.split("/")]
    info = next(n.split("/")[0] for n in names if ".dist-info/" in n)
    text = zipfile.ZipFile(wheel).read(f"{info}/METADATA").decode()
    assert "Requires-Python: >=3.11" in text and "License-Expression: Apache-2.0" in text
    assert f"{info}/licenses/LICENSE" in names, "the licence itself is part of the package"
    entries = zipfile.ZipFile(wheel).read(f"{info}/entry_points.txt").decode()
    assert "[deepagents_code.sandbox_providers]\ncove = cove.deepagents:CoveProvider" in entries
    assert any(n.endswith("/LICENSE") for n in tarfile.open(sdist).getnames())
