"""SessionManager: one sandbox per conversation, told when it is lost, and everything recorded."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from test_tools import WAIT, let_go  # type: ignore[import-not-found]

from cove import Cove, NotFound
from cove.langgraph_sandbox import SessionManager
from cove.langgraph_sandbox.sandbox import check_key, key_for_thread, session_viewer

Make = Callable[..., SessionManager]


def test_S4_30_S4_33_S4_34_S4_35_a_key_has_one_sandbox_until_it_is_stopped(manager: Make, server: Cove, key: str) -> None:
    sm = manager()
    assert sm.start(key) == key
    sandbox = sm.container_for(key).id
    assert sm.start(key) == key and sm.container_for(key).id == sandbox
    assert sm.exec(key, "print('hi')")["stdout"] == "hi\n"
    sm.stop(key)
    sm.stop(key)
    assert server.get(sandbox).info.state == "ended"
    sm.start(key)
    assert sm.container_for(key).id != sandbox


def test_S4_31_keys_do_not_see_each_other(manager: Make, key: str) -> None:
    sm = manager()
    for each in ("a", "b"):
        sm.start(f"{key}-{each}")
    sm.exec(f"{key}-a", "x = 1\nopen('/session/f', 'w').write('mine')")
    out = sm.exec(f"{key}-b", "import os\nprint('x' in globals(), os.path.exists('/session/f'))")
    assert out["stdout"] == "False False\n"


def test_S4_32_the_arguments_of_the_readme(server: Cove, key: str, tmp_path: Path) -> None:
    from cove.langgraph_sandbox import Config

    config = Config.from_env()
    sm = SessionManager(image=config.sandbox_image, session_storage=config.session_storage, dataset_access=config.dataset_access,
                        datasets_path=config.datasets_host_ro, session_root=config.sessions_root, tmpfs_size=config.tmpfs_size_mb)
    sm.start(key)
    assert server.get_session(key).info.size_bytes == 1024 << 20
    assert not (tmp_path / "sessions").exists()


def test_S4_36_an_unknown_or_stopped_session_is_told(manager: Make, key: str) -> None:
    sm = manager()
    with pytest.raises(RuntimeError, match="start"):
        sm.exec(key, "1")
    sm.start(key)
    sm.stop(key)
    with pytest.raises(RuntimeError, match="stopped"):
        sm.exec(key, "1")
    with pytest.raises(RuntimeError):
        sm.container_for(key + "-other")


def test_S4_37_another_process_goes_on_with_the_variables(manager: Make, key: str) -> None:
    sm = manager()
    sm.start(key)
    sm.exec(key, "x = 41")
    other = textwrap.dedent(f"""
        from cove.langgraph_sandbox import SessionManager
        sm = SessionManager(dataset_access="NONE")
        sm.start({key!r})
        print(sm.exec({key!r}, "print(x + 1)")["stdout"])
    """)
    assert subprocess.run([sys.executable, "-c", other], capture_output=True, text=True, timeout=60).stdout.strip() == "42"


def test_S4_38_D8_a_lost_sandbox_is_told_and_the_next_start_makes_a_new_one(manager: Make, key: str) -> None:
    sm = manager()
    sm.start(key)
    before = sm.container_for(key)
    before.kill()
    out = sm.exec(key, "1")
    assert (out["ok"], out["lost"]) == (False, True) and "lost" in out["error"]
    sm.start(key)
    assert sm.container_for(key).id != before.id and sm.exec(key, "print(1)")["stdout"] == "1\n"
    assert [e["event"] for e in sm.cove.get_session(key).log()] == ["session_started", "sandbox_lost", "session_started", "code_execution"]


def test_S4_39_an_idle_session_ends_by_itself(manager: Make, server: Cove, key: str) -> None:
    sm = manager(idle_timeout_s=10)
    sm.start(key)
    sm.exec(key, "1")
    sandbox = server.get_session(key).info.sandbox
    for _ in range(1200):
        if server.get(sandbox).info.state == "ended":
            break
        time.sleep(0.1)
    assert server.get_session(key).info.state == "reaped"
    assert server.get_session(key).info.lost is not None


def test_S4_39_an_idle_timeout_of_zero_is_none(manager: Make, server: Cove, key: str) -> None:
    manager(idle_timeout_s=0).start(key)
    assert server.get_session(key).info.idle_timeout_seconds <= 0


def test_S4_40_S4_41_S4_42_variables_and_imports_stay_in_slash_session(manager: Make, key: str) -> None:
    sm = manager()
    sm.start(key)
    sm.exec(key, "import math, os\na = 1")
    out = sm.exec(key, "a += 2\nprint(a, math.floor(2.5), os.getcwd())\nopen('here', 'w').close()")
    assert (out["ok"], out["stdout"], out["session_dir"]) == (True, "3 2 /session\n", "")


def test_S4_45_memory_is_limited(manager: Make, key: str) -> None:
    sm = manager(limits={"memory_bytes": 256 << 20})
    sm.start(key)
    out = sm.exec(key, "x = bytearray(1 << 30)", timeout=600)
    assert not out["ok"] and out["outcome"] in ("oom", "error"), out
    assert sm.exec(key, "print(1)", timeout=600)["stdout"] == "1\n"


def test_D5_S4_45_the_sandbox_has_no_rights_and_a_bound_on_processes(manager: Make, key: str) -> None:
    sm = manager()
    sm.start(key)
    status = sm.exec(key, "print(open('/proc/self/status').read())")["stdout"]
    told = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert (told["CapEff"], told["NoNewPrivs"], told["Seccomp"]) == ("0000000000000000", "1", "2")
    assert told["Uid"].split()[0] != "0"
    assert sm.container_for(key).refresh().limits.pids > 0


def test_S4_46_S4_47_D7_a_timeout_fires_and_the_session_survives(manager: Make, key: str) -> None:
    sm = manager()
    sm.start(key)
    sm.exec(key, "kept = 7")
    began = time.monotonic()
    out = sm.exec(key, "while True: pass", timeout=1)
    assert not out["ok"] and out["outcome"] == "timeout" and time.monotonic() - began < 200
    again = sm.exec(key, "print(kept)")
    assert again["stdout"] == "7\n" or out["lost"]


@pytest.mark.parametrize("code", ["exit()", "import os\nos._exit(3)", "import ctypes\nctypes.string_at(0)"], ids=["exit", "_exit", "segfault"])
def test_S4_48_D8_a_kernel_that_ends_is_told_and_started_again(manager: Make, key: str, code: str) -> None:
    sm = manager()
    sm.start(key)
    sm.exec(key, "x = 1")
    out = sm.exec(key, code)
    assert (out["ok"] and code == "exit()") or out["error"]
    after = sm.exec(key, "print('x' in globals())")
    assert after["ok"] and after["stdout"].strip() == str(not out["lost"])


def test_S4_49_D13_stderr_subprocesses_and_values_are_captured(manager: Make, key: str) -> None:
    sm = manager()
    sm.start(key)
    out = sm.exec(key, "import sys, os\nprint('err', file=sys.stderr)\nos.system('echo from the shell')\n2 + 2")
    assert (out["stderr"], out["stdout"], out["result"]) == ("err\n", "from the shell\n", "4")


@pytest.mark.parametrize("bad", ["../x", "a/b", "", ".", "..", "-x", "a b", "a\0b", "x" * 129, "ä"])
def test_S4_52_D3_a_key_that_could_be_a_path_is_refused(manager: Make, tmp_path: Path, bad: str) -> None:
    sm = manager(session_storage="BIND")
    for use in (sm.start, sm.stop, lambda k: sm.exec(k, "1"), sm.get_session_dir):
        with pytest.raises(ValueError, match="session key"):
            use(bad)
    assert not (tmp_path / "sessions").exists()


def test_S4_52_D3_the_server_refuses_such_a_key_too(server: Cove) -> None:
    for bad in ("../x", "a b", "x" * 129):
        answer = httpx.put(f"{server.url}/cove/v1/sessions/{httpx.URL('/' + bad).raw_path.decode()[1:].replace('/', '%2F')}",
                           headers=server._t.settings.headers, json={})
        assert answer.status_code in (400, 404), (bad, answer.text)


def test_S4_65_a_thread_id_of_any_form_is_a_key() -> None:
    assert key_for_thread("user-1:thread@2") == "user-1:thread@2"
    odd = key_for_thread("../etc/passwd")
    assert check_key(odd) == odd and odd != key_for_thread("../etc/shadow")


def test_S4_53_D14_parallel_calls_of_a_session_run_one_after_the_other(manager: Make, key: str) -> None:
    sm = manager()
    sm.start(key)
    sm.exec(key, "import time\nseen = []")
    code = "n = {0}\nseen.append(('in', n)); time.sleep(.02); seen.append(('out', n))\nopen(f'/session/artifacts/{0}.txt', 'w').write(str(n))"
    with ThreadPoolExecutor(10) as pool:
        outs = list(pool.map(lambda i: sm.exec(key, code.format(i)), range(10)))
    assert [[a["name"] for a in out["artifacts"]] for out in outs] == [[f"{i}.txt"] for i in range(10)]
    seen = sm.exec(key, "print(all(a[1] == b[1] for a, b in zip(seen[::2], seen[1::2])), len(seen))")["stdout"]
    assert seen == "True 20\n"


async def test_S4_54_D14_async_calls_leave_the_loop_free(manager: Make, key: str) -> None:
    sm = manager()
    await sm.astart(key)
    out, _ = await asyncio.gather(sm.aexec(key, WAIT), let_go(sm, [key]))
    await sm.astop(key)
    assert out["stdout"] == "done\n"


async def test_a_cancelled_call_interrupts_its_code(manager: Make, key: str) -> None:
    sm = manager()
    await sm.astart(key)
    begun = asyncio.Event()
    code = "import time\nprint('begun', flush=True)\ntime.sleep(3600)"
    running = asyncio.create_task(sm.aexec(key, code, timeout=None, on_event=lambda e: begun.set() if e.type == "stdout" else None))
    await begun.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (await sm.aexec(key, "print(1)"))["stdout"] == "1\n"


async def test_S4_55_twenty_sessions_at_once(manager: Make, key: str) -> None:
    sm = manager(tmpfs_size=16)
    keys = [f"{key}-{i}" for i in range(20)]
    await asyncio.gather(*(sm.astart(k) for k in keys))
    await asyncio.gather(*(sm.aexec(k, f"me = {i}") for i, k in enumerate(keys)))
    outs = await asyncio.gather(*(sm.aexec(k, "print(me)") for k in keys))
    assert [o["stdout"] for o in outs] == [f"{i}\n" for i in range(20)]
    assert len({sm.container_for(k).id for k in keys[:3]}) == 3


def test_D15_cleaning_up_leaves_the_sessions_of_others(manager: Make, key: str) -> None:
    one, other = manager(), manager()
    one.start(f"{key}-1")
    other.start(f"{key}-2")
    one.cleanup_all_containers()
    assert other.exec(f"{key}-2", "print(1)")["stdout"] == "1\n"
    with pytest.raises(RuntimeError):
        one.exec(f"{key}-1", "1")


def test_S4_19_it_works_without_any_setting(server: Cove, key: str) -> None:
    sm = SessionManager()
    sm.start(key)
    (artifact,) = sm.exec(key, "open('/session/artifacts/a.txt', 'w').write('hi')")["artifacts"]
    assert httpx.get(artifact["url"]).text == "hi"
    sm.stop(key)


def test_D4_nobody_runs_code_without_a_key(server: Cove, manager: Make, key: str) -> None:
    sm = manager()
    sm.start(key)
    assert httpx.post(f"{server.url}/cove/v1/sessions/{key}/run", json={"code": "1"}).status_code == 401
    out = sm.exec(key, "import builtins, sys\nbuiltins.print = lambda *a: sys.exit(1)\njson = open = None")
    assert out["ok"] and sm.exec(key, "2 + 2")["result"] == "4"


def test_D17_the_server_tells_its_health_and_metrics(server: Cove) -> None:
    assert httpx.get(f"{server.url}/healthz").status_code == 200
    assert httpx.get(f"{server.url}/readyz").status_code == 200
    assert "cove_" in httpx.get(f"{server.url}/metrics").text


# --- BIND: what is recorded


def _read(directory: Path) -> tuple[list[dict], dict, dict]:
    log = [json.loads(line) for line in (directory / "session.log").read_text().splitlines()]
    return log, json.loads((directory / "session_metadata.json").read_text()), json.loads((directory / "python_state.json").read_text())


def test_S4_111_S4_112_S4_113_S4_114_S4_118_S4_119_D6_a_bind_session_leaves_its_history(manager: Make, key: str) -> None:
    sm = manager(session_storage="BIND")
    sm.start(key)
    sm.exec(key, "import math\nx = 'text'\nprint(x)")
    out = sm.exec(key, "open('/session/artifacts/a.csv', 'w').write('a,b')\n1/0", timeout=120)
    sandbox = sm.container_for(key).id
    sm.stop(key)
    directory = Path(out["session_dir"])
    assert directory == sm.get_session_dir(key) and (directory / "artifacts").is_dir() and (directory / "data").is_dir()
    log, metadata, state = _read(directory)
    assert [e["event"] for e in log] == ["session_started", "code_execution", "code_execution", "artifacts_created", "session_stopped"]
    assert {e["container_id"] for e in log} == {sandbox} and log[0]["config"]["session_storage"] == "bind"
    good, bad = log[1], log[2]
    assert (good["code"], good["success"], good["stdout"]) == ("import math\nx = 'text'\nprint(x)", True, "text\n")
    assert (bad["success"], bad["timeout"]) == (False, 120) and "ZeroDivisionError" in bad["error"]
    assert all(e["duration_ms"] > 0 and e["cpu_ms"] > 0 and e["peak_bytes"] > 0 and "exit_code" in e for e in (good, bad))
    assert (log[3]["artifact_count"], log[3]["artifacts"][0]["filename"], log[3]["artifacts"][0]["size_bytes"]) == (1, "a.csv", 3)
    assert metadata | {"session_id": key, "container_id": sandbox, "execution_count": 2, "final_execution_count": 2, "session_storage": "BIND",
                       "dataset_access": "NONE", "image": "sandbox:latest"} == metadata
    assert metadata["stopped_at"] and metadata["created_at"] and metadata["last_used"]
    assert (state["variables"]["x"], "math" in state["imported_modules"]) == ({"type": "str", "value": "text"}, True)


def test_S4_113_values_are_cut_and_asking_for_them_runs_no_code_of_the_users(manager: Make, key: str) -> None:
    sm = manager(session_storage="BIND")
    sm.start(key)
    sm.exec(key, "long = 'y' * 5000\n_hidden = 1\nasked = []\nclass Odd:\n    def __repr__(self): asked.append(1); raise ValueError\n    __str__ = __repr__\nodd = Odd()")
    state = json.loads((sm.get_session_dir(key) / "python_state.json").read_text())
    assert len(state["variables"]["long"]["value"]) <= 1003 and "_hidden" not in state["variables"]
    assert sm.exec(key, "print(asked)")["stdout"] == "[]\n"


def test_a_new_session_of_an_old_key_has_a_log_of_its_own(manager: Make, server: Cove, key: str) -> None:
    sm = manager(session_storage="BIND")
    for _ in range(2):
        sm.start(key)
        sm.exec(key, "1")
        server.get_session(key).remove()
    log, _, _ = _read(sm.get_session_dir(key))
    assert [e["event"] for e in log] == ["session_started", "code_execution"]
    assert len(list(sm.get_session_dir(key).glob("session-*.log"))) == 1


def test_half_a_line_that_a_crash_left_is_mended(manager: Make, key: str) -> None:
    sm = manager(session_storage="BIND")
    sm.start(key)
    with (sm.get_session_dir(key) / "session.log").open("a") as f:
        f.write('{"seq": 9, "ev')
    sm.exec(key, "1")
    log, _, _ = _read(sm.get_session_dir(key))
    assert [e["seq"] for e in log] == [1, 2]


def test_a_tmpfs_session_has_no_directory(manager: Make, key: str, tmp_path: Path) -> None:
    sm = manager()
    sm.start(key)
    sm.exec(key, "1")
    with pytest.raises(RuntimeError, match="BIND"):
        sm.get_session_dir(key)
    assert not (tmp_path / "sessions").exists()


def test_a_damaged_log_on_this_host_fails_no_run(manager: Make, key: str) -> None:
    sm = manager(session_storage="BIND")
    sm.start(key)
    sm.exec(key, "x = 1")
    log = sm.get_session_dir(key) / "session.log"
    with log.open("a") as f:
        f.write("no JSON\n[1]\n" + "y" * 300_000 + "\nhalf a line")
    assert sm.exec(key, "print(x)")["stdout"] == "1\n"
    seen = [json.loads(line)["seq"] for line in log.read_text().splitlines() if line.startswith("{")]
    assert seen == [1, 2, 3]  # nothing twice
    log.unlink()
    assert sm.exec(key, "x = 2")["ok"]
    assert len(log.read_text().splitlines()) == 4  # the server has it all
    sm.stop(key)
    sm.cove.get_session(key).remove()
    log.unlink()
    sm.start(key)  # another session of that key, with nothing to put aside
    assert json.loads(log.read_text().splitlines()[0])["event"] == "session_started"


def _viewer(*args: str | Path) -> subprocess.CompletedProcess[str]:
    """The viewer, started by its path as the documents do."""
    return subprocess.run([sys.executable, session_viewer.__file__, *map(str, args)], capture_output=True, text=True)


GOLDEN = """Session directory: {dir}
==================================================

=== SESSION METADATA ===
Session ID: s
Created: 2026-01-01T00:00:00+00:00
Container ID: sb1
Storage Mode: BIND
Execution Count: 2

=== SESSION LOG ===
[t1] session_started
  Container: sb1
[t2] code_execution
  ✓ Code: print(1)
  Took: 12 ms, 3 ms CPU, 2 MB peak, exit code 0
  Output: 1
Invalid log entry: not json
[t3] code_execution
  ✗ Code: {long}...
  Error: boom
[t4] artifacts_created
  - a (text/plain, 1 bytes)
  - b (text/plain, 1 bytes)
  - c (text/plain, 1 bytes)
  ... and 1 more

=== PYTHON STATE ===
Captured: t5
Variables:
  x: int = 1
Modules: json, math

=== ARTIFACTS ===
left/over.txt (4 bytes)
a (1 bytes, art_a)
b (1 bytes, art_b)
c (1 bytes, art_c)
d (1 bytes, art_d)
"""


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    directory = tmp_path / "s"
    (directory / "artifacts" / "left").mkdir(parents=True)
    (directory / "artifacts" / "left" / "over.txt").write_text("text")
    artifacts = [{"filename": n, "content_type": "text/plain", "size_bytes": 1, "id": f"art_{n}"} for n in "abcd"]
    lines = [{"event": "session_started", "timestamp": "t1", "container_id": "sb1"},
             {"event": "code_execution", "timestamp": "t2", "code": "print(1)", "success": True, "stdout": "1\n", "duration_ms": 12.1, "cpu_ms": 3.2,
              "peak_bytes": 2 << 20, "exit_code": 0},
             {"event": "code_execution", "timestamp": "t3", "code": "y" * 500, "success": False, "error": "boom"},
             {"event": "artifacts_created", "timestamp": "t4", "artifacts": artifacts}]
    text = [json.dumps(line) for line in lines]
    text.insert(2, "not json")
    (directory / "session.log").write_text("\n".join(text) + "\n")
    (directory / "session_metadata.json").write_text(json.dumps({
        "session_id": "s", "created_at": "2026-01-01T00:00:00+00:00", "container_id": "sb1", "host_port": None, "session_storage": "BIND", "execution_count": 2}))
    (directory / "python_state.json").write_text(json.dumps(
        {"timestamp": "t5", "variables": {"x": {"type": "int", "value": "1"}}, "imported_modules": ["math", "json"]}))
    return directory


def test_S4_115_S4_117_the_viewer_tells_everything_and_broken_lines_too(recorded: Path) -> None:
    done = _viewer(recorded)
    assert (done.returncode, done.stdout) == (0, GOLDEN.format(dir=recorded, long="y" * 100))


def test_S4_116_the_viewer_leaves_out_what_it_is_told(recorded: Path) -> None:
    done = _viewer(recorded, "--limit", "1", "--no-state", "--no-artifacts")
    assert "[t4]" in done.stdout and "[t3]" not in done.stdout
    assert "PYTHON STATE" not in done.stdout and "=== ARTIFACTS" not in done.stdout


def test_the_viewer_passes_nothing_on_to_a_terminal(recorded: Path) -> None:
    """Names of files, variables and modules are a sandbox's choice too."""
    evil = "\x1b]0;title\x07\ud800"
    artifact = {"filename": evil, "content_type": evil, "size_bytes": 1, "id": evil, "error": evil}
    lines = [{"event": "artifacts_created", "timestamp": evil, "artifacts": [artifact]}, {"event": evil},
             {"event": "code_execution", "code": evil, "stdout": evil, "error": evil}, {"event": "sandbox_lost", "message": evil, "container_id": evil}]
    (recorded / "session.log").write_text("".join(json.dumps(line) + "\n" for line in lines) + evil[:-1] + "\n")
    (recorded / "session_metadata.json").write_text(json.dumps({"session_id": evil, "image": evil}))
    (recorded / "python_state.json").write_text(json.dumps(
        {"timestamp": evil, "variables": {evil: {"type": evil, "value": evil}}, "imported_modules": [evil]}))
    (recorded / "artifacts" / evil[:-1]).write_text("")
    done = _viewer(recorded)
    assert done.returncode == 0, done.stderr
    assert "title" in done.stdout and not [c for c in done.stdout if c != "\n" and not c.isprintable()]


def test_S4_117_a_session_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    assert [done.returncode for done in (_viewer(tmp_path / "none"), _viewer(), _viewer(tmp_path, "--limit", "x"))] == [1, 1, 1]
    empty = _viewer(tmp_path)
    assert empty.returncode == 0 and "No session log found" in empty.stdout


def test_S4_120_the_history_of_a_tmpfs_session_can_be_exported_and_viewed(manager: Make, key: str, tmp_path: Path) -> None:
    sm = manager()
    sm.start(key)
    sm.exec(key, "print('in memory')")
    program = os.environ["COVE_TEST_BINARY"]
    target = tmp_path / "export"
    done = subprocess.run([program, "session", "export", key, str(target)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "in memory" in _viewer(target if (target / "session.log").exists() else target / key).stdout


def test_unknown_things_are_not_found(server: Cove) -> None:
    with pytest.raises(NotFound):
        server.get_session("nobody")
