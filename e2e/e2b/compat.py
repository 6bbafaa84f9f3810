#!/usr/bin/env python3
"""Writes the tables of docs/compatibility.md: one row for each public method of the official SDKs, from the report of a run.

Usage: compat.py REPORT NODE_MODULES PAGE, by the Python that has the SDKs. The methods come from the packages themselves,
so that one which nobody tests has a row too, and says so.
"""

import importlib
import importlib.metadata
import inspect
import json
import pathlib
import re
import sys

import e2b
import e2b_code_interpreter
from e2b.template.main import TemplateBuilder

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "suite"))
import page  # noqa: E402

# Why a method has no test: it makes no request, or what it needs is left out on purpose.
UNTESTED = {
    r"Template\.from_(debian|ubuntu|fedora|alpine|arch|python|node|bun)_image": "becomes `from_image` in the SDK",
    r"Template\.from_gcp_registry": "becomes `from_image` with a name and a password",
    r"Template\.from_aws_registry": "an error that says what to do instead",
    r"Template\.(pip|npm|bun|apt)_install|Template\.git_clone": "becomes `run_cmd` in the SDK",
    r"Template\.(add_mcp_server|beta_dev_container_prebuild|beta_set_dev_container_start)": "needs E2B's own images",
    r"(Volume|Secret)\..*": "left out: see above",
}

GROUPS = [
    ("Sandbox", "Sandboxes"), ("commands", "Commands"), ("CommandHandle", "Command handles"), ("pty", "Terminals"), ("files", "Files"),
    ("WatchHandle", "Watch handles"), ("git", "Git"), ("code", "Code interpreter"), ("Template", "Templates"), ("E2B", "Client object"),
    ("Volume", "Volumes"), ("Secret", "Secrets"),
]


def public(cls, prefix):
    return [f"{prefix}{name}" for name, value in inspect.getmembers(cls) if not name.startswith("_") and callable(value)]


def python_methods(asynchronous):
    flavour = "async" if asynchronous else "sync"
    a = "Async" if asynchronous else ""
    inside = {part: importlib.import_module(f"e2b.sandbox_{flavour}.{part}") for part in (
        "commands.command", "commands.command_handle", "commands.pty", "filesystem.filesystem", "filesystem.watch_handle", "git",
    )}
    sandbox = public(getattr(e2b, a + "Sandbox"), "Sandbox.")
    code = public(getattr(e2b_code_interpreter, a + "Sandbox"), "Sandbox.")
    found = sandbox + [m.removeprefix("Sandbox.") for m in set(code) - set(sandbox)]
    found += public(inside["commands.command"].Commands, "commands.") + public(inside["commands.pty"].Pty, "pty.")
    found += public(getattr(inside["commands.command_handle"], a + "CommandHandle"), "CommandHandle.")
    found += public(inside["filesystem.filesystem"].Filesystem, "files.") + public(inside["git"].Git, "git.")
    found += public(getattr(inside["filesystem.watch_handle"], a + "WatchHandle"), "WatchHandle.")
    found += public(getattr(e2b, a + "Template"), "Template.") + public(TemplateBuilder, "Template.")
    found += public(getattr(e2b, a + "Volume"), "Volume.") + public(getattr(e2b, a + "Secret"), "Secret.")
    return {*found, "E2B"}


def snake(name):
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def common_name(method):
    """The Python name of a method that JavaScript spells in its own way; words in parentheses stay."""
    if method.startswith("e2b "):
        return method
    name, _, rest = method.partition(" ")
    owner, dot, verb = name.rpartition(".")
    verb = verb if verb.isupper() or verb == "E2B" else snake(verb)
    verb = "send_stdin" if (owner, verb) == ("pty", "send_input") else verb
    return f"{owner}{dot}{verb}" + (f" {rest}" if rest else "")


def js_methods(modules):
    """The methods of the declarations that the packages ship."""
    text = (modules / "e2b/dist/index.d.ts").read_text()
    code = (modules / "@e2b/code-interpreter/dist/index.d.ts").read_text()
    owners = {
        "Sandbox": "Sandbox.", "SandboxApi": "Sandbox.", "Commands": "commands.", "CommandHandle": "CommandHandle.", "Pty": "pty.",
        "Filesystem": "files.", "WatchHandle": "WatchHandle.", "Git": "git.", "TemplateBase": "Template.", "Volume": "Volume.", "Secret": "Secret.",
    }
    found = {"E2B"}
    for cls, prefix in owners.items():
        for body in re.findall(rf"^declare class {cls} .*?^}}", text, re.M | re.S):
            found |= {prefix + m for m in re.findall(r"^  (?:static )?([a-z]\w*)(?:<[^>]*>)?\(", body, re.M) if m != "constructor"}
    body = re.search(r"^declare class Sandbox extends.*?^}", code, re.M | re.S).group()
    found |= set(re.findall(r"^  ([a-z]\w*)\(", body, re.M)) - {"constructor"}
    return found


def group_of(method):
    owner = method.split(".")[0].split(" ")[0]
    if method.endswith("(E2B_DOMAIN)"):
        return "By host name over TLS (`E2B_DOMAIN` alone)"
    if owner in ("run_code",) or owner.endswith(("_code_context", "_code_contexts")):
        return "Code interpreter"
    if method.startswith("e2b "):
        return "Command line (`@e2b/cli`)"
    return dict(GROUPS).get(owner, "The wire itself (no SDK)")


def tables(report, modules):
    columns = {"python": "Python", "python-async": "Python async", "js": "JavaScript"}
    exists = {
        "python": python_methods(False),
        "python-async": python_methods(True),
        "js": {common_name(m) for m in js_methods(modules)},
    }
    versions = {p: importlib.metadata.version(p) for p in ("e2b", "e2b-code-interpreter")}
    locked = json.loads((HERE / "js/package-lock.json").read_text())["packages"]
    js = {p: locked[f"node_modules/{p}"]["version"] for p in ("e2b", "@e2b/code-interpreter", "@e2b/cli")}
    lines = [
        "Python: " + ", ".join(f"`{p}` {v}" for p, v in versions.items()) + ". JavaScript: " + ", ".join(f"`{p}` {v}" for p, v in js.items()) + ".",
        "A tick carries how many tests prove the method; a dash: the method exists and no test calls it; nothing: the SDK has no such method.",
        "",
    ]
    found = page.rows(columns, exists, page.outcomes(report, common_name), UNTESTED, group_of)
    return "\n".join(lines + page.tables(columns, found, [title for _, title in GROUPS]))


def main():
    report, modules, path = map(pathlib.Path, sys.argv[1:4])
    page.write(path, "e2b", tables(report, modules))


main()
