#!/usr/bin/env python3
"""Pins defaults/NAME.in into defaults/NAME.lock: one lock with markers and hashes for every Python and machine.

    internal/template/lock.py [python3.9 python3.10 ...]

Each interpreter resolves for itself, so that markers are evaluated where they hold; a version of VERSIONS without
an interpreter here is resolved by the newest given one. pip's own configuration decides where packages come from.
Nothing is built and nothing is installed. Read the diff before committing it: these packages run in every sandbox.
"""
import json, os, pathlib, re, shutil, subprocess, sys, tempfile

VERSIONS = ["3.9", "3.10", "3.11", "3.12", "3.13", "3.14"]
MACHINES = ["x86_64", "aarch64"]
# The glibc floor is 2.28 (Debian 10, RHEL 8): a newer wheel would install here and not on an older host.
TAGS = [f"manylinux_2_{n}" for n in range(28, 4, -1)] + ["manylinux2014", "manylinux2010", "manylinux1"]
HERE = pathlib.Path(__file__).resolve().parent / "defaults"


def interpreters(given):
    found = {}
    for exe in given or [f"python{v}" for v in VERSIONS]:
        exe = shutil.which(exe)
        if not exe:
            continue
        ask = [exe, "-I", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        answer = subprocess.run(ask, capture_output=True, text=True)
        if answer.returncode == 0:
            found.setdefault(answer.stdout.strip(), exe)
    return {v: found[v] for v in VERSIONS if v in found}


def resolve(exe, version, machine, requirements):
    with tempfile.TemporaryDirectory() as tmp:
        report = os.path.join(tmp, "report.json")
        command = [exe, "-I", "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed",
                   "--only-binary", ":all:", "--implementation", "cp", "--python-version", version,
                   "--target", os.path.join(tmp, "t"), "--report", report, "-r", str(requirements)]
        for tag in TAGS:
            command += ["--platform", f"{tag}_{machine}"]
        subprocess.run(command, check=True)
        for item in json.load(open(report))["install"]:
            name = re.sub(r"[-_.]+", "-", item["metadata"]["name"]).lower()
            yield name, item["metadata"]["version"], item["download_info"]["archive_info"]["hashes"]["sha256"]


def marker(versions):
    """The shortest marker that selects these of VERSIONS; they are contiguous in practice, and checked to be."""
    first, last = VERSIONS.index(versions[0]), VERSIONS.index(versions[-1])
    assert VERSIONS[first:last + 1] == versions, versions
    parts = []
    if first:
        parts.append(f'python_version >= "{VERSIONS[first]}"')
    if last < len(VERSIONS) - 1:
        parts.append(f'python_version < "{VERSIONS[last + 1]}"')
    return " and ".join(parts)


def lock(path, pythons):
    pins = {}  # (name, version) -> {python version: hashes}
    for version in VERSIONS:
        exe = pythons.get(version) or list(pythons.values())[-1]
        for machine in MACHINES:
            for name, pinned, digest in resolve(exe, version, machine, path):
                pins.setdefault((name, pinned), {}).setdefault(version, set()).add(digest)
    lines = [f"# Made by lock.py from {path.name}: do not edit. CPython {VERSIONS[0]} to {VERSIONS[-1]}; {', '.join(MACHINES)}."]
    for (name, pinned), per in sorted(pins.items()):
        where = marker([v for v in VERSIONS if v in per])
        entry = f"{name}=={pinned}" + (f" ; {where}" if where else "")
        hashes = sorted(set().union(*per.values()))
        lines.append(" \\\n    ".join([entry] + [f"--hash=sha256:{h}" for h in hashes]))
    path.with_suffix(".lock").write_text("\n".join(lines) + "\n")
    print(f"{path.stem}.lock: {len(pins)} pins")


def main():
    pythons = interpreters(sys.argv[1:])
    if not pythons:
        sys.exit("no interpreter with pip among " + ", ".join(VERSIONS))
    for path in sorted(HERE.glob("*.in")):
        lock(path, pythons)


if __name__ == "__main__":
    main()
