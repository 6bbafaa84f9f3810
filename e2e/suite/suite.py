"""What the suites of SDKs share: waiting, and the report with one JSON line for each test and the methods that it proves."""

import asyncio
import json
import time


def eventually(check, seconds=120.0, every=0.05):
    """Waits until check returns something true, and returns it."""
    end = time.monotonic() + seconds
    while True:
        got = check()
        if got:
            return got
        if time.monotonic() > end:
            raise AssertionError(f"not so after {seconds} s: last {got!r}")
        time.sleep(every)


async def aeventually(check, seconds=120.0, every=0.05):
    """eventually for coroutines."""
    end = time.monotonic() + seconds
    while True:
        got = await check()
        if got:
            return got
        if time.monotonic() > end:
            raise AssertionError(f"not so after {seconds} s: last {got!r}")
        await asyncio.sleep(every)


def note(path, sdk, item, call, report):
    """Adds how a test went to the report at path, if there is to be one; sdk is what the test drives."""
    if not path or not (report.when == "call" or (report.when == "setup" and not report.passed)):
        return
    why = ""
    if hasattr(report, "wasxfail"):
        why = report.wasxfail
    elif report.skipped:
        why = report.longrepr[2].removeprefix("Skipped: ")
    elif report.failed and call.excinfo is not None:
        why = f"{call.excinfo.type.__name__}: {str(call.excinfo.value).strip()}".splitlines()[0][:200]
    line = {
        "sdk": sdk,
        "test": item.nodeid,
        "methods": [m for mark in item.iter_markers("proves") for m in mark.args],
        "outcome": report.outcome,
        "why": why,
        "seconds": round(report.duration, 3),
    }
    with open(path, "a", encoding="utf-8") as f:
        f.write(json.dumps(line) + "\n")
