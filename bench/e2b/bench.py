"""Measures a server through the official Python SDK, and the SDK alone against a server that does nothing.

`make bench-e2b` starts both, says where they are (E2B_…, E2B_NOTHING_URL) and keeps what this writes: rows as JSON in
the file that is named, and a table for people. The two take turns, so that both meet the same machine. Where a sandbox
is made and ended in each turn, the next waits until the machine has nothing to do, as the other benchmarks do: ending one
goes on after the answer. What it costs to wait for nothing is a row of its own.
"""

import json
import math
import os
import random
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from e2b_code_interpreter import Sandbox

N = int(os.environ.get("E2B_BENCH_N", "200"))
BIG = int(os.environ.get("E2B_BENCH_BIG_N", "10"))
BARS = {"create": 3.0, "create, back to back": 3.0, "run_code": 3.0}
REAL = {"api_url": os.environ["E2B_API_URL"], "sandbox_url": os.environ["E2B_SANDBOX_URL"], "api_key": os.environ["E2B_API_KEY"]}
NOTHING = {"api_url": os.environ["E2B_NOTHING_URL"], "sandbox_url": os.environ["E2B_NOTHING_URL"], "api_key": "e2b_00"}

rows = []


def percentile(samples, p):
    """By nearest rank, as the other benchmarks do it."""
    return sorted(samples)[max(1, math.ceil(len(samples) * p / 100)) - 1]


def took(action):
    begun = time.perf_counter()
    action()
    return (time.perf_counter() - begun) * 1e3


def row(scenario, subject, samples, tried):
    rows.append(
        {
            "scenario": scenario, "subject": subject, "n": tried, "ok": len(samples),
            "p50_ms": round(percentile(samples, 50), 3), "p95_ms": round(percentile(samples, 95), 3), "p99_ms": round(percentile(samples, 99), 3),
            "value": round(percentile(samples, 50), 3), "unit": "ms",
        }
    )


def processor_times():
    """The ticks that all processors were idle, and all ticks."""
    with open("/proc/stat", encoding="ascii") as f:
        ticks = [int(t) for t in f.readline().split()[1:]]
    return ticks[3] + ticks[4], sum(ticks)


def await_idle(patience=2.0, window=0.02, part=0.9):
    """Returns when the processors have had next to nothing to do for a moment, or have been busy for too long."""
    end = time.monotonic() + patience
    while time.monotonic() < end:
        idle, total = processor_times()
        time.sleep(window)
        idle_then, total_then = processor_times()
        if idle_then - idle >= part * (total_then - total):
            return


def measure(scenario, n, *subjects, settle=False):
    """Measures (subject, action) pairs in turns; the last row is the ratio of the medians."""
    samples = {name: [] for name, _ in subjects}
    for name, action in subjects:
        for _ in range(min(5, n)):
            action()
    for _ in range(n):
        for name, action in random.sample(subjects, len(subjects)):
            if settle:
                await_idle()
            samples[name].append(action())
    for name, _ in subjects:
        row(scenario, name, samples[name], n)
    if len(subjects) == 2:
        value = statistics.median(samples["cove"]) / statistics.median(samples["nothing"])
        rows.append({"scenario": scenario, "subject": "cove / nothing", "n": n, "ok": n, "value": round(value, 2), "unit": "x"})


def creates(server):
    """One create, timed; what was made is ended before the next."""

    def action():
        made = []
        ms = took(lambda: made.append(Sandbox.create(timeout=60, **server)))
        made[0].kill()
        return ms

    return action


def first_runs(server):
    def action():
        made = []

        def create_and_run():
            made.append(Sandbox.create(timeout=60, **server))
            assert made[0].run_code("1+1").text == "2"

        ms = took(create_and_run)
        made[0].kill()
        return ms

    return action


def on(sandbox, action):
    return lambda: took(lambda: action(sandbox))


def run_code(sbx):
    assert sbx.run_code("1+1").text == "2"


def command(sbx):
    assert sbx.commands.run("true").exit_code == 0


def small_file(sbx):
    sbx.files.write("/tmp/small", b"x" * 1024)
    assert len(sbx.files.read("/tmp/small", format="bytes")) == 1024


BODY = os.urandom(1 << 20) * 100


def write_big(sbx):
    sbx.files.write("/tmp/big", BODY, use_octet_stream=True)


def read_big(sbx):
    assert sum(map(len, sbx.files.read("/tmp/big", format="stream"))) == len(BODY)


def burst(n):
    """Creates at once; each must succeed and answer."""

    def one(_):
        begun = time.perf_counter()
        sbx = Sandbox.create(timeout=120, **REAL)
        ms = (time.perf_counter() - begun) * 1e3
        assert sbx.run_code("1+1").text == "2"
        return sbx, ms

    begun = time.perf_counter()
    with ThreadPoolExecutor(n) as pool:
        made = list(pool.map(one, range(n)))
    wall = time.perf_counter() - begun
    row("create, 100 at once", "cove", [ms for _, ms in made], n)
    rows.append({"scenario": "100 at once, to the last answer", "subject": "cove", "n": n, "ok": len(made), "value": round(wall * 1e3, 1), "unit": "ms"})
    for sbx, _ in made:
        sbx.kill()


def print_table():
    print(f"{'scenario':34} {'subject':16} {'n':>5} {'p50':>10} {'p99':>10}")
    for r in rows:
        if r["unit"] == "x":
            bar = BARS.get(r["scenario"])
            verdict = "" if bar is None else f"  (bar {bar:g}×: {'met' if r['value'] <= bar else 'MISSED'})"
            print(f"{r['scenario']:34} {r['subject']:16} {r['n']:5} {r['value']:9.2f}×{verdict}")
        else:
            p99 = f"{r['p99_ms']:8.2f}ms" if "p99_ms" in r else ""
            print(f"{r['scenario']:34} {r['subject']:16} {r['n']:5} {r['value']:8.2f}ms {p99}")


def main(out):
    real, nothing = Sandbox.create(timeout=3600, **REAL), Sandbox.create(timeout=3600, **NOTHING)
    try:
        measure("create", N, ("cove", creates(REAL)), ("nothing", creates(NOTHING)), settle=True)
        measure("create, back to back", N, ("cove", creates(REAL)), ("nothing", creates(NOTHING)))
        measure("first run_code, with its create", N, ("cove", first_runs(REAL)), ("nothing", first_runs(NOTHING)), settle=True)
        measure("run_code", N, ("cove", on(real, run_code)), ("nothing", on(nothing, run_code)))
        measure("commands.run", N, ("cove", on(real, command)), ("nothing", on(nothing, command)))
        measure("files, 1 KB written and read", N, ("cove", on(real, small_file)), ("nothing", on(nothing, small_file)))
        measure("files, 100 MB written", BIG, ("cove", on(real, write_big)), ("nothing", on(nothing, write_big)))
        measure("files, 100 MB read", BIG, ("cove", on(real, read_big)), ("nothing", on(nothing, read_big)))
        burst(100)
    finally:
        real.kill()
    print_table()
    with open(out, "w", encoding="utf-8") as f:
        json.dump({"rows": rows}, f, indent=1)
        f.write("\n")


main(sys.argv[1])
