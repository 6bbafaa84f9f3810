"""Measures a server through OpenSandbox's Python SDK, beside a Docker engine that runs the same image on the same machine.

`make bench-opensandbox` starts the server, makes the image and says where everything is (OPEN_SANDBOX_…,
OPENSANDBOX_BENCH_…). The subjects take turns, so that both meet the same machine, and where something is made and ended in
each turn the next waits until the machine has nothing to do. Rows go to the file that is named, as JSON, and a table to
people. The engine is one of our own: its files, its socket and its network are apart from those of an engine that serves
this machine.
"""

import asyncio
import contextlib
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import httpx
from opensandbox import Sandbox, SandboxSync

N = int(os.environ.get("OPENSANDBOX_BENCH_N", "30"))
MANY = int(os.environ.get("OPENSANDBOX_BENCH_MANY", "200"))
UNPACKS = int(os.environ.get("OPENSANDBOX_BENCH_UNPACKS", "5"))
AT_ONCE = 20
IMAGE, BIG = os.environ["OPENSANDBOX_BENCH_IMAGE"], os.environ["OPENSANDBOX_BENCH_BIG"]
ROOTFS, LAYERS = os.environ["OPENSANDBOX_BENCH_ROOTFS"], os.environ["OPENSANDBOX_BENCH_LAYERS"].split(":")
COVE, PROCESSES = os.environ["OPENSANDBOX_BENCH_COVE"], [int(p) for p in os.environ["OPENSANDBOX_BENCH_PROCESSES"].split(",")]
URL, KEY = "http://" + os.environ["OPEN_SANDBOX_DOMAIN"], os.environ["OPEN_SANDBOX_API_KEY"]
RESOURCE = {"cpu": "1", "memory": "512Mi"}
LIMITS = ["--memory", "512m", "--cpus", "1", "--pids-limit", "256"]

rows, notes, bars = [], [], []


def percentile(samples, p):
    """By nearest rank, as the other benchmarks do it."""
    return sorted(samples)[max(1, math.ceil(len(samples) * p / 100)) - 1]


def took(action):
    begun = time.perf_counter()
    action()
    return (time.perf_counter() - begun) * 1e3


def row(scenario, subject, samples, tried):
    rows.append({
        "scenario": scenario, "subject": subject, "n": tried, "ok": len(samples), "p50_ms": round(percentile(samples, 50), 3),
        "p99_ms": round(percentile(samples, 99), 3), "value": round(statistics.median(samples), 3), "unit": "ms",
    })
    return statistics.median(samples)


def single(scenario, subject, n, ok, value, unit):
    rows.append({"scenario": scenario, "subject": subject, "n": n, "ok": ok, "value": round(value, 3), "unit": unit})


def bar(name, value, unit, wanted, met):
    bars.append({"bar": name, "value": round(value, 3), "unit": unit, "wanted": wanted, "met": met})


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


def measure(scenario, n, subjects, settle=False):
    """Measures actions by name, in turns, and returns their medians."""
    samples = {name: [] for name in subjects}
    for action in subjects.values():
        action()
    for _ in range(n):
        for name in random.sample(list(subjects), len(subjects)):
            if settle:
                await_idle()
            samples[name].append(subjects[name]())
    return {name: row(scenario, name, s, n) for name, s in samples.items()}


def memory_of(pids):
    """The proportional memory of processes and all that descend from them, in MiB."""
    children = {}
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            parent = int((path / "stat").read_text().rsplit(")", 1)[1].split()[1])
            children.setdefault(parent, []).append(int(path.name))
    todo, total = list(pids), 0
    while todo:
        pid = todo.pop()
        todo += children.get(pid, [])
        with contextlib.suppress(OSError):
            for text in pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if text.startswith("Pss:"):
                    total += int(text.split()[1])
    return total / 1024


class Engine:
    """A Docker engine of our own, or the reason why there is none."""

    def __init__(self):
        self.dir = tempfile.mkdtemp(prefix="cove-bench-docker")
        self.daemon, self.why = None, ""
        if not shutil.which("dockerd") or not shutil.which("docker"):
            self.why = "docker is not installed (apt install docker.io)"
            return
        self.log = open(f"{self.dir}/log", "wb")
        self.daemon = subprocess.Popen(
            ["unshare", "--net", "dockerd", "--data-root", f"{self.dir}/data", "--exec-root", f"{self.dir}/exec", "--pidfile", f"{self.dir}/pid", "--host", f"unix://{self.dir}/socket"],
            stdout=self.log, stderr=self.log, start_new_session=True,
        )
        end = time.monotonic() + 60
        while self.tell("version", check=False).returncode != 0:
            if self.daemon.poll() is not None or time.monotonic() > end:
                self.why = "the engine did not start: " + pathlib.Path(f"{self.dir}/log").read_text()[-200:]
                return
            time.sleep(0.1)
        with open(ROOTFS, "rb") as f:
            self.tell("import", "-", "bench", stdin=f)
        transport = httpx.HTTPTransport(uds=f"{self.dir}/socket")
        self.api = httpx.Client(transport=transport, base_url="http://docker", timeout=60)

    def argv(self, *args):
        return ["docker", "--host", f"unix://{self.dir}/socket", *args]

    def tell(self, *args, check=True, **kw):
        return subprocess.run(self.argv(*args), check=check, capture_output=True, **kw)

    def run(self):
        """`docker run` until its command has spoken; what is left is removed after the clock has stopped."""
        name = f"b{random.getrandbits(48):x}"
        begun = time.perf_counter()
        with subprocess.Popen(self.argv("run", "--name", name, *LIMITS, "bench", "echo", "ok"), stdout=subprocess.PIPE) as p:
            assert p.stdout.readline() == b"ok\n"
            ms = (time.perf_counter() - begun) * 1e3
        self.tell("rm", "--force", name)
        return ms

    def run_by_api(self):
        """The same by three requests to the engine, without its command line program."""
        limits = {"Memory": 512 << 20, "NanoCpus": 10**9, "PidsLimit": 256}
        begun = time.perf_counter()
        made = self.api.post("/containers/create", json={"Image": "bench", "Cmd": ["echo", "ok"], "HostConfig": limits}).json()["Id"]
        assert self.api.post(f"/containers/{made}/start").status_code == 204
        self.api.post(f"/containers/{made}/wait")
        ms = (time.perf_counter() - begun) * 1e3
        self.api.delete(f"/containers/{made}?force=true")
        return ms

    def idle(self, name):
        self.tell("run", "--detach", "--name", name, *LIMITS, "bench", "sleep", "100000")

    def exec_by_api(self, name):
        made = self.api.post(f"/containers/{name}/exec", json={"Cmd": ["true"], "AttachStdout": True, "AttachStderr": True}).json()["Id"]
        self.api.post(f"/exec/{made}/start", json={"Detach": False})
        assert self.api.get(f"/exec/{made}/json").json()["ExitCode"] == 0

    def processes(self):
        """The engine, and the process that it has beside each container, which belongs to nobody."""
        found = [self.daemon.pid]
        for path in pathlib.Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if b"shim" in (words := (path / "cmdline").read_bytes()) and self.dir.encode() in words:
                    found.append(int(path.name))
        return found

    def upstream(self):
        """Whether OpenSandbox's own server could be measured here, and if not why: it puts a program of its own, execd, into every container."""
        execd = "opensandbox/execd:v1.1.0"
        pulled = subprocess.run(["nsenter", "--net", "--target", str(os.getpid()), *self.argv("pull", execd)], capture_output=True, text=True, timeout=60, check=False)
        if pulled.returncode == 0:
            return f"opensandbox-server: its image {execd} could be pulled here, but this benchmark does not run it yet"
        return f"opensandbox-server 1.1.1 needs the image {execd}, which could not be pulled: docker itself is measured instead"

    def close(self):
        if self.daemon is not None:
            self.tell("ps", "--all", "--quiet", check=False)
            self.daemon.terminate()
            try:
                self.daemon.wait(30)
            except subprocess.TimeoutExpired:
                self.daemon.kill()
                self.daemon.wait()
            self.log.close()
        shutil.rmtree(self.dir, ignore_errors=True)


def first_command():
    """A sandbox of a cached image and its first command, by the SDK."""
    begun = time.perf_counter()
    sbx = SandboxSync.create(IMAGE, timeout=timedelta(minutes=2), resource=RESOURCE)
    assert sbx.commands.run("echo ok").text == "ok"
    ms = (time.perf_counter() - begun) * 1e3
    sbx.destroy()
    return ms


class Wire:
    """The same requests without the SDK, whose own time is most of what a program sees."""

    def __init__(self):
        self.client = httpx.Client(base_url=URL, headers={"OPEN-SANDBOX-API-KEY": KEY}, timeout=60)

    def create(self, image):
        body = {"image": {"uri": image}, "timeout": 120, "resourceLimits": RESOURCE, "entrypoint": ["tail", "-f", "/dev/null"]}
        made = self.client.post("/v1/sandboxes", json=body)
        assert made.status_code == 202, made.text
        return made.json()["id"]

    def command(self, sandbox, text="true"):
        answer = self.client.post(f"/sandboxes/{sandbox}/proxy/44772/command", json={"command": text})
        assert '"execution_complete"' in answer.text, answer.text

    def end(self, sandbox):
        self.client.delete(f"/v1/sandboxes/{sandbox}")

    def timed_create(self, image, command=False):
        def action():
            begun = time.perf_counter()
            made = self.create(image)
            if command:
                self.command(made)
            ms = (time.perf_counter() - begun) * 1e3
            self.end(made)
            return ms

        return action


def first_commands(engine, wire):
    subjects = {"cove": first_command, "cove, plain HTTP": wire.timed_create(IMAGE, command=True)}
    if not engine.why:
        subjects |= {"docker run": engine.run, "docker API": engine.run_by_api}
    medians = measure("create to first command", N, subjects, settle=True)
    if not engine.why:
        # Most of what a program waits for through the SDK is the SDK itself, which makes several HTTP clients: told apart.
        for ours in ("cove", "cove, plain HTTP"):
            ratio = medians["docker run"] / medians[ours]
            single("create to first command", f"docker run / {ours}", N, N, ratio, "x")
            bar(f"create to first command, docker run against {ours}", ratio, "x", "≥ 20", ratio >= 20)


def round_trips(engine, wire):
    sbx = SandboxSync.create(IMAGE, timeout=timedelta(hours=1), resource=RESOURCE)
    subjects = {"cove": lambda: took(lambda: sbx.commands.run("true")), "cove, plain HTTP": lambda: took(lambda: wire.command(sbx.id))}
    if not engine.why:
        engine.idle("trips")
        subjects |= {"docker exec": lambda: took(lambda: engine.tell("exec", "trips", "true")), "docker API": lambda: took(lambda: engine.exec_by_api("trips"))}
    medians = measure("command round trip", MANY if engine.why else min(MANY, 100), subjects)
    bar("command round trip", medians["cove"], "ms", "≤ 5", medians["cove"] <= 5)
    sbx.destroy()
    if not engine.why:
        engine.tell("rm", "--force", "trips")


async def burst():
    async def one():
        begun = time.perf_counter()
        sbx = await Sandbox.create(IMAGE, timeout=timedelta(minutes=2), resource=RESOURCE)
        try:
            assert (await sbx.commands.run("echo ok")).text == "ok"
            return (time.perf_counter() - begun) * 1e3
        finally:
            await sbx.kill()
            await sbx.close()

    begun = time.perf_counter()
    done = await asyncio.gather(*(one() for _ in range(AT_ONCE)), return_exceptions=True)
    return [d for d in done if not isinstance(d, BaseException)], (time.perf_counter() - begun) * 1e3


def at_once(engine):
    await_idle()
    samples, wall = asyncio.run(burst())
    row(f"{AT_ONCE} creates at once, each to its first command", "cove", samples, AT_ONCE)
    single(f"{AT_ONCE} creates at once, to the last end", "cove", AT_ONCE, len(samples), wall, "ms")
    bar(f"{AT_ONCE} creates at once", len(samples), "of 20", "all", len(samples) == AT_ONCE)
    if engine.why:
        return
    await_idle()
    begun = time.perf_counter()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        theirs = list(pool.map(lambda _: engine.run(), range(AT_ONCE)))
    row(f"{AT_ONCE} creates at once, each to its first command", "docker run", theirs, AT_ONCE)
    single(f"{AT_ONCE} creates at once, to the last end", "docker run", AT_ONCE, len(theirs), (time.perf_counter() - begun) * 1e3, "ms")


def idle_memory(engine, wire):
    await_idle()
    before = memory_of(PROCESSES)
    made = [wire.create(IMAGE) for _ in range(AT_ONCE)]
    await_idle()
    single("memory of an idle sandbox", "cove", AT_ONCE, AT_ONCE, (memory_of(PROCESSES) - before) / AT_ONCE, "MiB")
    for each in made:
        wire.end(each)
    if engine.why:
        return
    before = memory_of(engine.processes())
    for i in range(AT_ONCE):
        engine.idle(f"idle{i}")
    await_idle()
    single("memory of an idle sandbox", "docker", AT_ONCE, AT_ONCE, (memory_of(engine.processes()) - before) / AT_ONCE, "MiB")
    engine.tell("rm", "--force", *(f"idle{i}" for i in range(AT_ONCE)))


def cached_creates(wire):
    medians = measure("create", MANY, {"cached image": wire.timed_create(IMAGE), "host template": wire.timed_create("base")}, settle=True)
    more = medians["cached image"] - medians["host template"]
    single("create", "cached image - host template", MANY, MANY, more, "ms")
    bar("create from a cached image, above the host template", more, "ms", "≤ 1", more <= 1)


def unpack_by_cove():
    """The time from the first layer's unpacking to the image's end, as the lines of a pull tell it."""
    begun, said = None, []
    with subprocess.Popen([COVE, "image", "pull", BIG], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as p:
        for text in p.stdout:
            said.append(text)
            if "unpacking" in text and begun is None:
                begun = time.perf_counter()
            if text.startswith(f"{BIG}: done"):
                ended = time.perf_counter()
    assert p.returncode == 0 and begun is not None, "".join(said)
    for verb in (["remove", BIG], ["prune"]):
        subprocess.run([COVE, "image", *verb], check=True, capture_output=True)
    return (ended - begun) * 1e3


def unpack_by_tar():
    into = tempfile.mkdtemp(prefix="cove-bench-tar", dir=os.path.dirname(ROOTFS))
    os.sync()
    begun = time.perf_counter()
    for layer in LAYERS:
        subprocess.run(["tar", "-x", "-z", "--same-owner", "-f", layer, "-C", into], check=True)
    ms = (time.perf_counter() - begun) * 1e3
    shutil.rmtree(into)
    return ms


def unpacks():
    size = int(os.environ["OPENSANDBOX_BENCH_LAYERS_BYTES"]) / 1e6
    medians = measure("unpacking", UNPACKS, {"cove": unpack_by_cove, "tar -x": unpack_by_tar}, settle=True)
    speed = {name: size / (ms / 1e3) for name, ms in medians.items()}
    for name, value in speed.items():
        single(f"unpacking {size:.0f} MB", name, UNPACKS, UNPACKS, value, "MB/s")
    part = 100 * speed["cove"] / speed["tar -x"]
    bar("unpacking, of tar -x", part, "%", "≥ 70", part >= 70)


def print_table():
    print(f"{'scenario':50} {'subject':30} {'n':>4} {'ok':>4} {'p50':>12} {'p99':>12}")
    for r in rows:
        p99 = f"{r['p99_ms']:9.2f} ms" if "p99_ms" in r else ""
        print(f"{r['scenario']:50} {r['subject']:30} {r['n']:4} {r['ok']:4} {r['value']:8.2f} {r['unit']:4} {p99}")
    for b in bars:
        print(f"bar: {b['bar']}: {b['value']:.2f} {b['unit']} (wanted {b['wanted']}): {'met' if b['met'] else 'MISSED'}")
    for note in notes:
        print("note:", note)


def host():
    model = next((t.split(":")[1].strip() for t in pathlib.Path("/proc/cpuinfo").read_text().splitlines() if t.startswith("model name")), "")
    return {"cpus": os.cpu_count(), "cpu": model, "kernel": platform.release(), "load_before": os.getloadavg()[0]}


def main(out):
    where = host()
    wire = Wire()
    wire.end(wire.create(IMAGE))  # pulls it
    engine = Engine()
    try:
        notes.append(engine.why and f"docker: {engine.why}" or "docker: " + engine.tell("version", "--format", "{{.Server.Version}}").stdout.decode().strip())
        if not engine.why:
            notes.append(engine.upstream())
        first_commands(engine, wire)
        round_trips(engine, wire)
        at_once(engine)
        idle_memory(engine, wire)
        cached_creates(wire)
        unpacks()
    finally:
        engine.close()
    print_table()
    result = {"host": where, "sdk": importlib.metadata.version("opensandbox"), "rows": rows, "bars": bars, "notes": notes}
    with open(out, "w", encoding="utf-8") as f:
        json.dump(result, f, indent=1, ensure_ascii=False)
        f.write("\n")


main(sys.argv[1])
