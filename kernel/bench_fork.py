"""Measures what each of the zygote's optimisations is worth: fork → ready, and → the answer of a first pandas cell.

    python3 kernel/bench_fork.py [--python /path/to/python] [--n 40] [--only NAME,NAME] [--parallel 16]

As root, with an interpreter that has numpy, pandas, matplotlib and IPython. Sandboxes are made ahead, as a pool does it.
"""

import argparse
import os
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "testdata"))
import peer  # noqa: E402

PRELOAD = ["numpy", "pandas", "matplotlib.pyplot"]
CELL = ("import numpy as np, pandas as pd\ndf = pd.DataFrame({'a': np.arange(1000), 'b': np.arange(1000) * 2.0})\n"
        "df.groupby(df.a % 7).b.sum()")
OFF = {name: False for name in ("arena", "warmup", "pack", "fill", "freeze", "immortal", "collapse")}
CASES = {
    "nothing": OFF,
    "freeze": dict(OFF, freeze=True),
    "freeze+warmup": dict(OFF, freeze=True, warmup=True),
    "freeze+warmup+immortal": dict(OFF, freeze=True, warmup=True, immortal=True),
    "all": {},
    "all but arena": {"arena": False},
    "all but warmup": {"warmup": False},
    "all but pack": {"pack": False},
    "all but fill": {"fill": False},
    "all but freeze": {"freeze": False},
    "all but immortal": {"immortal": False},
    "all but collapse": {"collapse": False},
    "all, without the shim": {"shim": False},
}


def median(samples):
    return sorted(samples)[len(samples) // 2]


def quantiles(samples):
    ordered = sorted(samples)
    return "%7.2f %7.2f" % (ordered[len(ordered) // 2] * 1e3, ordered[int(len(ordered) * 0.99)] * 1e3)


def on_cpu(pid):
    """Seconds that a process has run: unlike the clock, hardly disturbed by what else the machine does."""
    with open("/proc/%d/schedstat" % pid) as f:
        return int(f.read().split()[0]) / 1e9


def fork_once(maker, sandbox):
    zygote = on_cpu(maker.pid)
    start = time.perf_counter()
    kernel = maker.order(sandbox)
    kernel.event()
    ready = time.perf_counter() - start
    message, fds = maker.expect("forked", kernel.token)
    os.close(fds[0])
    zygote = on_cpu(maker.pid) - zygote
    ready_cpu = zygote + on_cpu(message["pid"])
    again = time.perf_counter()
    kernel.run(CELL)
    answer = ready + time.perf_counter() - again
    answer_cpu = zygote + on_cpu(message["pid"])
    samples = []
    for _ in range(20):
        at = time.perf_counter()
        kernel.run("1+1")
        samples.append(time.perf_counter() - at)
    with open("/proc/%d/smaps_rollup" % message["pid"]) as f:
        private = sum(int(line.split()[1]) for line in f if line.startswith("Private"))
    kernel.close()
    return ready, answer, ready_cpu, answer_cpu, sorted(samples)[10], private


def floor_once(maker):
    start = time.perf_counter()
    kernel = maker.floor()
    kernel.event()
    ready = time.perf_counter() - start
    kernel.run(CELL)
    answer = time.perf_counter() - start
    os.close(maker.expect("forked", kernel.token)[1][0])
    kernel.close()
    maker.expect("exit", kernel.token)
    return ready, answer


def measure(name, tune, options):
    maker = peer.Maker(options.python, preload=PRELOAD, tune=tune)
    assert maker.ready["type"] == "ready", maker.ready
    rows = []
    for _ in range(options.n):
        sandbox = peer.Sandbox()
        rows.append(fork_once(maker, sandbox))
        sandbox.kill()
    ready, answer, ready_cpu, answer_cpu, cell, private = zip(*rows[3:])
    print("%-24s %s   %s   %6.2f %6.2f   %7.2f   %8d   %7.1f" % (
        name, quantiles(ready), quantiles(answer), median(ready_cpu) * 1e3, median(answer_cpu) * 1e3, median(cell) * 1e3,
        median(private), maker.ready["seconds"]), flush=True)
    if name == "all":
        ready, answer = zip(*[floor_once(maker) for _ in range(options.n)][3:])
        print("%-24s %s   %s" % ("  a plain fork of it", quantiles(ready), quantiles(answer)), flush=True)
        if options.parallel:
            burst(maker, options.parallel)
    maker.close()


def burst(maker, width):
    rounds = 4
    spent = 0.0
    for _ in range(rounds):
        pool = [peer.Sandbox() for _ in range(width)]
        start = time.perf_counter()
        kernels = [maker.order(sandbox) for sandbox in pool]
        for kernel in kernels:
            kernel.event()
            kernel.send({"code": CELL})
        for kernel in kernels:
            kernel.finish()
        spent += time.perf_counter() - start
        for kernel, sandbox in zip(kernels, pool):
            os.close(maker.expect("forked", kernel.token)[1][0])
            kernel.close()
            sandbox.kill()
    print("%-24s %.0f per second, cell included" % ("  %d in parallel" % width, rounds * width / spent), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=os.environ.get("COVE_TEST_PYTHON") or sys.executable)
    parser.add_argument("--n", type=int, default=40)
    parser.add_argument("--only", default="")
    parser.add_argument("--parallel", type=int, default=16)
    options = parser.parse_args()
    peer.Agent.listen_to_pipes = False  # its threads would be what we measure
    peer.private_mounts(*peer.prefixes(options.python), peer.KERNEL_DIR)
    os.mkdir("/tmp/home")
    print("%-24s %-15s   %-15s   %-13s   %7s   %8s   %7s" % ("ms", "ready p50   p99", "answer p50  p99", "on CPU, both", "1+1 p50",
                                                             "KiB priv", "start s"))
    for name, tune in CASES.items():
        if not options.only or name in options.only.split(","):
            measure(name, tune, options)


if __name__ == "__main__":
    main()
