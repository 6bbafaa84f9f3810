#!/usr/bin/env python3
"""Writes OpenSandbox's tables of docs/compatibility.md: one row for each public method of the SDKs, from the report of a run.

Usage: compat.py REPORT NODE_MODULES PAGE, by the Python that has the SDKs. The methods come from the packages themselves,
so that one which nobody tests has a row too, and says so.
"""

import importlib.metadata
import inspect
import json
import pathlib
import re
import sys

import click
import code_interpreter
import opensandbox
from code_interpreter.services import Codes
from code_interpreter.sync.services import CodesSync
from opensandbox.services import Commands, Filesystem
from opensandbox.sync.services import CommandsSync, FilesystemSync
from opensandbox_cli.main import cli

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "suite"))
import page  # noqa: E402

# Why a method has no test: it makes no request, or what it needs is left out on purpose.
UNTESTED = {
    r"Sandbox\.(connection_config|origin|files|commands|metrics|diagnostics)": "makes no request",
    r"CodeInterpreter\.(sandbox|id|files|commands|codes|metrics|close|aclose|check_ready)": "makes no request of its own",
    r"SandboxManager\.(connection_config|create|close)": "makes no request",
    r"SandboxPool\..*": "asks nothing of the server but what is tested above",
    r"Sandbox\.create_from_template|SandboxManager\..*_template.*": "left out: see above",
    r"osb (credential-vault|template).*": "left out: see above",
    r"osb (config|skills).*": "asks nothing of the server",
    r"osb devops (logs|events)": "the same as `osb diagnostics`",
    r"(isolation|credential_vault)\..*": "left out: see above",
}

GROUPS = [
    ("Sandbox", "Sandboxes"), ("SandboxManager", "Manager"), ("commands", "Commands"), ("files", "Files"), ("CodeInterpreter", "Code interpreter"),
    ("codes", "Code interpreter"), ("SandboxPool", "Client-side pools"), ("isolation", "Isolated sessions"), ("credential_vault", "Credential vault"),
    ("PTY", "Terminals (no SDK)"), ("osb", "Command line (`osb`)"),
]


def public(cls, prefix):
    return {prefix + name for name, value in inspect.getmembers(cls) if not name.startswith("_") and (callable(value) or isinstance(value, property))}


def python_methods(suffix):
    part = {"": (Commands, Filesystem, Codes), "Sync": (CommandsSync, FilesystemSync, CodesSync)}[suffix]
    found = public(getattr(opensandbox, "Sandbox" + suffix), "Sandbox.") | public(getattr(opensandbox, "SandboxManager" + suffix), "SandboxManager.")
    found |= public(part[0], "commands.") | public(part[1], "files.") | public(part[2], "codes.")
    found |= public(getattr(code_interpreter, "CodeInterpreter" + suffix), "CodeInterpreter.")
    return found - {"codes.ping"} | public(opensandbox.SandboxPoolAsync if suffix == "" else opensandbox.SandboxPoolSync, "SandboxPool.")


def commands_of(group, path):
    for name, command in sorted(group.commands.items()):
        if isinstance(command, click.Group):
            yield from commands_of(command, f"{path} {name}")
        else:
            yield f"{path} {name}"


def snake(name):
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def common_name(method):
    """The Python name of a method that JavaScript spells in its own way; words in parentheses stay."""
    if method.startswith(("osb ", "PTY ")):
        return method
    name, _, rest = method.partition(" ")
    owner, dot, verb = name.rpartition(".")
    owner = owner if owner[:1].isupper() else snake(owner)
    rest = {"(useServerProxy)": "(use_server_proxy)"}.get(rest, rest)
    return f"{owner}{dot}{snake(verb)}" + (f" {rest}" if rest else "")


def js_methods(modules):
    """The methods of the declarations that the package ships."""
    text = "\n".join(p.read_text() for p in sorted((modules / "@alibaba-group/opensandbox/dist").glob("*.d.ts")))
    owners = {"class Sandbox": "Sandbox.", "class SandboxManager": "SandboxManager.", "interface ExecdCommands": "commands.", "interface SandboxFiles": "files."}
    found = set()
    for owner, prefix in owners.items():
        for body in re.findall(rf"^(?:declare )?{owner} .*?^}}", text, re.M | re.S):
            found |= {prefix + m for m in re.findall(r"^    (?:static )?([a-z]\w*)(?:<[^>]*>)?\(", body, re.M) if m != "constructor"}
    return found


def group_of(method):
    return dict(GROUPS).get(method.split(".")[0].split(" ")[0], "The rest")


def june(proofs):
    """One line for the packages of June: they run the same tests."""
    tests = {(t["sdk"], t["test"]): t["outcome"] for (sdk, _), all in proofs.items() if sdk.endswith("-june") for t in all}
    counts = {o: sum(v == o for v in tests.values()) for o in ("passed", "skipped", "failed")}
    pins = re.findall(r"^(opensandbox\S*)==(\S+)", (HERE / "june/requirements.txt").read_text(), re.M)
    names = ", ".join(f"`{p}` {v}" for p, v in pins)
    return f"The same tests with the packages of June 2026 ({names}): {counts['passed']} pass, {counts['failed']} fail, {counts['skipped']} call what those packages do not have."


def tables(report, modules):
    columns = {"python": "Python", "python-async": "Python async", "js": "JavaScript"}
    proofs = page.outcomes(report, common_name)
    shown = {key: tests for key, tests in proofs.items() if key[0] in columns}
    exists = {"python": python_methods("Sync") | set(commands_of(cli, "osb")), "python-async": python_methods(""), "js": {common_name(m) for m in js_methods(modules)}}
    versions = {p: importlib.metadata.version(p) for p in ("opensandbox", "opensandbox-code-interpreter", "opensandbox-cli")}
    locked = json.loads((HERE / "js/package-lock.json").read_text())["packages"]
    js = locked["node_modules/@alibaba-group/opensandbox"]["version"]
    lines = [
        "Python: " + ", ".join(f"`{p}` {v}" for p, v in versions.items()) + f". JavaScript: `@alibaba-group/opensandbox` {js}.",
        "A tick carries how many tests prove the method; a dash: the method exists and no test calls it; nothing: the SDK has no such method.",
        june(proofs),
        "",
    ]
    found = page.rows(columns, exists, shown, UNTESTED, group_of)
    return "\n".join(lines + page.tables(columns, found, [title for _, title in GROUPS]))


def main():
    report, modules, path = map(pathlib.Path, sys.argv[1:4])
    page.write(path, "opensandbox", tables(report, modules))


main()
