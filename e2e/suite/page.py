"""Tables of docs/compatibility.md: one row for each method of SDKs, from the report of a run."""

import json
import re
import sys
from collections import defaultdict


def outcomes(report, common_name):
    """For each SDK and method, by the name that all languages share, the tests that prove it."""
    proofs = defaultdict(list)
    for text in report.read_text().splitlines():
        test = json.loads(text)
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


def rows(columns, exists, proofs, untested, group_of):
    """Rows by their group. untested says, by pattern, why a method has no test."""
    found = defaultdict(list)
    for method in sorted(set().union(*exists.values()) | {m for _, m in proofs}):
        cells = [cell(method in exists[c], proofs.get((c, method), [])) for c in columns]
        why = [w for _, w in cells if w]
        if not any(method == m for _, m in proofs):
            why = [reason for pattern, reason in untested.items() if re.fullmatch(pattern, method)] or ["no test yet"]
        found[group_of(method)].append((method, [c for c, _ in cells], "; ".join(dict.fromkeys(why))))
    return found


def escape(text):
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def tables(columns, found, known):
    """Markdown of rows, the known groups first and in their order."""
    lines = []
    for title in list(dict.fromkeys(known)) + sorted(set(found) - set(known)):
        if found.get(title):
            lines += [f"#### {title}", "", f"| | {' | '.join(columns.values())} | why |", f"|---|{'---|' * (len(columns) + 1)}"]
            lines += [f"| `{method}` | {' | '.join(cells)} | {escape(why)} |" for method, cells, why in found[title]] + [""]
    return lines


def write(page, name, text):
    """Puts text into its place in a page."""
    begin, end = f"<!-- compat:begin {name} -->", "<!-- compat:end -->"
    before, _, rest = page.read_text().partition(begin)
    _, _, after = rest.partition(end)
    if not after:
        sys.exit(f"{page} has no place for the tables: {begin} … {end}")
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}")
