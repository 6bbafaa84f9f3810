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
from collections import defaultdict

import e2b
import e2b_code_interpreter
from e2b.template.main import TemplateBuilder

HERE = pathlib.Path(__file__).parent

# Why a method has no test: it makes no request, or what it needs is left out on purpose.
UNTESTED = {
    r"Template\.from_((debian|ubuntu|fedora|alpine|arch|python|node|bun)_)?image": "an image from a registry: see above",
    r"Template\.from_(aws|gcp)_registry": "an image from a registry: see above",
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


def outcomes(report):
    """For each SDK and method the tests that prove it."""
    proofs = defaultdict(list)
    for line in report.read_text().splitlines():
        test = json.loads(line)
        for method in test["methods"]:
            proofs[test["sdk"], common_name(method)].append(test)
    return proofs


def cell(exists, tests):
    if not exists and not tests:
        return "", ""
    failed = [t for t in tests if t["outcome"] == "failed"]
    if failed:
        return "fails", "; ".join(sorted({t["why"] for t in failed}))
    if any(t["outcome"] == "passed" for t in tests):
        skipped = {t["why"] for t in tests if t["outcome"] == "skipped"}
        return f"✓ {sum(t['outcome'] == 'passed' for t in tests)}", "; ".join(sorted(skipped))
    if tests:
        return "skipped", "; ".join(sorted({t["why"] for t in tests}))
    return "–", ""


def group_of(method):
    owner = method.split(".")[0].split(" ")[0]
    if method.endswith("(E2B_DOMAIN)"):
        return "By host name over TLS (`E2B_DOMAIN` alone)"
    if owner in ("run_code",) or owner.endswith(("_code_context", "_code_contexts")):
        return "Code interpreter"
    if method.startswith("e2b "):
        return "Command line (`@e2b/cli`)"
    return dict(GROUPS).get(owner, "The wire itself (no SDK)")


def escape(text):
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def table(columns, exists, proofs):
    rows = defaultdict(list)
    for method in sorted(set().union(*exists.values()) | {m for _, m in proofs}):
        cells = [cell(method in exists[c], proofs.get((c, method), [])) for c in columns]
        why = [w for _, w in cells if w]
        if not any(method == m for _, m in proofs):
            why = [reason for pattern, reason in UNTESTED.items() if re.fullmatch(pattern, method)] or ["no test yet"]
        rows[group_of(method)].append((method, [c for c, _ in cells], "; ".join(dict.fromkeys(why))))
    return rows


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
    rows = table(columns, exists, outcomes(report))
    known = [title for _, title in GROUPS]
    for title in known + sorted(set(rows) - set(known)):
        if rows.get(title):
            lines += [f"#### {title}", "", f"| | {' | '.join(columns.values())} | why |", f"|---|{'---|' * (len(columns) + 1)}"]
            lines += [f"| `{method}` | {' | '.join(cells)} | {escape(why)} |" for method, cells, why in rows[title]] + [""]
    return "\n".join(lines)


def main():
    report, modules, page = map(pathlib.Path, sys.argv[1:4])
    begin, end = "<!-- compat:begin e2b -->", "<!-- compat:end -->"
    before, _, rest = page.read_text().partition(begin)
    _, _, after = rest.partition(end)
    if not after:
        sys.exit(f"{page} has no place for the tables: {begin} … {end}")
    page.write_text(f"{before}{begin}\n{tables(report, modules)}\n{end}{after}")


main()
