"""Pause and resume, auto-pause and auto-resume, snapshots and forks."""

import time

import pytest
from conftest import LIFETIME, eventually

from e2b import InvalidArgumentException, Sandbox, SandboxNotFoundException, SandboxState, TimeoutException
from e2b_code_interpreter import Sandbox as CodeSandbox

BOOT = "cat /proc/sys/kernel/random/boot_id"


@pytest.mark.proves("Sandbox.pause", "Sandbox.connect")
def test_memory_and_files_survive_a_pause(make_code):
    sbx = make_code()
    sbx.run_code("x = 41")
    sbx.files.write("kept", "on disk")
    ticking = sbx.commands.run("while :; do date +%s%N > /tmp/tick; sleep 0.1; done", background=True, timeout=0)
    boot = sbx.commands.run(BOOT).stdout
    ticking.disconnect()
    assert sbx.pause() is True
    assert sbx.is_running() is False
    assert sbx.get_info().state == SandboxState.PAUSED
    again = CodeSandbox.connect(sbx.sandbox_id, timeout=LIFETIME)
    assert again.is_running() and again.get_info().state == SandboxState.RUNNING
    assert again.run_code("x + 1").text == "42"
    assert again.files.read("kept") == "on disk"
    assert again.commands.run(BOOT).stdout == boot
    assert ticking.pid in [p.pid for p in again.commands.list()]
    before = again.files.read("/tmp/tick")
    eventually(lambda: again.files.read("/tmp/tick") != before)


@pytest.mark.proves("Sandbox.pause", "Sandbox.beta_pause")
def test_a_pause_happens_once(make):
    sbx = make()
    assert sbx.pause() is True
    assert sbx.pause() is False
    assert Sandbox.pause(sbx.sandbox_id) is False
    assert sbx.beta_pause() is False
    with pytest.raises(SandboxNotFoundException):
        Sandbox.pause("nonexistingsandbox")


@pytest.mark.proves("Sandbox.pause")
def test_a_paused_sandbox_answers_nothing_and_can_be_killed(make):
    sbx = make()
    sbx.pause()
    with pytest.raises(TimeoutException, match="not found"):
        sbx.commands.run("true")
    with pytest.raises(TimeoutException, match="not found"):
        sbx.files.read("/etc/hostname")
    assert sbx.kill() is True
    with pytest.raises(SandboxNotFoundException):
        sbx.connect()


@pytest.mark.proves("Sandbox.pause", "Sandbox.connect")
def test_a_pause_of_files_alone_reboots(make_code):
    sbx = make_code()
    sbx.run_code("x = 41")
    sbx.files.write("kept", "on disk")
    boot = sbx.commands.run(BOOT).stdout
    process = sbx.commands.run("sleep 3600", background=True, timeout=0)
    process.disconnect()
    assert sbx.pause(mode="filesystem") is True
    sbx.connect(timeout=LIFETIME)
    assert sbx.files.read("kept") == "on disk"
    assert sbx.commands.run(BOOT).stdout != boot
    assert sbx.commands.list() == []
    assert sbx.run_code("x").error.name == "NameError"


@pytest.mark.proves("Sandbox.connect")
def test_a_resume_may_ask_for_a_reboot(make):
    sbx = make()
    boot = sbx.commands.run(BOOT).stdout
    sbx.files.write("kept", "on disk")
    sbx.pause()
    sbx.connect(timeout=LIFETIME, on_resume="reboot")
    assert sbx.commands.run(BOOT).stdout != boot
    assert sbx.files.read("kept") == "on disk"


@pytest.mark.proves("Sandbox.pause")
def test_a_strict_pause_of_a_healthy_sandbox(make):
    sbx = make()
    assert sbx.pause(strict=True) is True


@pytest.mark.slow
@pytest.mark.proves("Sandbox.create")
def test_a_timeout_may_pause_instead_of_kill(make):
    sbx = make(lifecycle={"on_timeout": "pause"})
    assert sbx.get_info().lifecycle == {"on_timeout": "pause", "auto_resume": False}
    sbx.files.write("kept", "x")
    sbx.set_timeout(1)
    eventually(lambda: sbx.get_info().state == SandboxState.PAUSED)
    assert sbx.is_running() is False
    sbx.connect(timeout=LIFETIME)
    assert sbx.files.read("kept") == "x"


@pytest.mark.slow
@pytest.mark.proves("Sandbox.create")
def test_traffic_wakes_what_may_be_woken(make):
    sbx = make(lifecycle={"on_timeout": "pause", "auto_resume": True})
    assert sbx.get_info().lifecycle == {"on_timeout": "pause", "auto_resume": True}
    sbx.set_timeout(1)
    eventually(lambda: sbx.get_info().state == SandboxState.PAUSED)
    assert sbx.commands.run("echo awake").stdout == "awake\n"
    info = sbx.get_info()
    assert info.state == SandboxState.RUNNING
    assert (info.end_at.timestamp() - time.time()) > 200
    sbx.pause()
    assert sbx.files.read("/etc/hostname")
    sbx.pause()
    assert sbx.is_running() is True


@pytest.mark.slow
@pytest.mark.proves("Sandbox.create")
def test_a_timeout_may_keep_the_files_alone(make):
    sbx = make(lifecycle={"on_timeout": {"action": "pause", "mode": "filesystem"}})
    boot = sbx.commands.run(BOOT).stdout
    sbx.set_timeout(1)
    eventually(lambda: sbx.get_info().state == SandboxState.PAUSED)
    with pytest.raises(TimeoutException):
        sbx.commands.run("true")
    sbx.connect(timeout=LIFETIME)
    assert sbx.commands.run(BOOT).stdout != boot
    with pytest.raises(InvalidArgumentException):
        Sandbox.create(lifecycle={"on_timeout": {"action": "pause", "mode": "filesystem"}, "auto_resume": True})


@pytest.mark.proves("Sandbox.create_snapshot", "Sandbox.list_snapshots", "Sandbox.delete_snapshot")
def test_a_snapshot_is_a_template(make, make_code):
    sbx = make_code()
    sbx.files.write("kept", "from the first")
    shot = sbx.create_snapshot()
    assert shot.snapshot_id and sbx.is_running()
    sbx.files.write("kept", "changed since")
    copy = make_code(shot.snapshot_id)
    assert copy.sandbox_id != sbx.sandbox_id
    assert copy.files.read("kept") == "from the first"
    assert shot.snapshot_id in [s.snapshot_id for s in sbx.list_snapshots().next_items()]
    assert shot.snapshot_id in [s.snapshot_id for s in Sandbox.list_snapshots(sandbox_id=sbx.sandbox_id).next_items()]
    assert Sandbox.delete_snapshot(shot.snapshot_id) is True
    assert Sandbox.delete_snapshot(shot.snapshot_id) is False
    assert sbx.list_snapshots().next_items() == []


@pytest.mark.proves("Sandbox.create_snapshot")
def test_a_snapshot_of_files_alone(make):
    sbx = make()
    sbx.files.write("kept", "x")
    shot = sbx.create_snapshot(mode="filesystem")
    other = make(shot.snapshot_id)
    assert other.files.read("kept") == "x"
    assert other.files.read("/run/e2b/.E2B_SANDBOX_ID") == other.sandbox_id
    Sandbox.delete_snapshot(shot.snapshot_id)


@pytest.mark.proves("Sandbox.create_snapshot", "Sandbox.list_snapshots")
def test_a_named_snapshot_is_found_by_name_and_replaced(make, tag):
    sbx = make()
    sbx.files.write("v", "1")
    first = sbx.create_snapshot(name=tag)
    assert any(tag in name for name in first.names)
    sbx.files.write("v", "2")
    second = sbx.create_snapshot(name=tag)
    assert second.snapshot_id == first.snapshot_id
    assert make(second.snapshot_id).files.read("v") == "2"
    assert make(tag).files.read("v") == "2"
    assert [s.snapshot_id for s in Sandbox.list_snapshots(name=tag).next_items()] == [second.snapshot_id]
    assert Sandbox.list_snapshots(name=tag + "x").next_items() == []
    assert Sandbox.delete_snapshot(second.snapshot_id) is True


@pytest.mark.proves("Sandbox.list_snapshots")
def test_snapshots_come_in_pages(make):
    sbx = make()
    made = {sbx.create_snapshot().snapshot_id for _ in range(3)}
    pages = sbx.list_snapshots(limit=1)
    got = []
    while pages.has_next:
        got += [s.snapshot_id for s in pages.next_items()]
    assert set(got) == made and len(got) == 3
    for shot in made:
        Sandbox.delete_snapshot(shot)


@pytest.mark.proves("Sandbox.create_snapshot")
def test_nothing_has_no_snapshot():
    with pytest.raises(SandboxNotFoundException):
        Sandbox.create_snapshot("nonexistingsandbox")


@pytest.mark.proves("Sandbox.fork")
def test_a_fork_goes_its_own_way_with_the_same_memory(make_code):
    sbx = make_code()
    sbx.run_code("x = [1]")
    sbx.files.write("kept", "before")
    forks = sbx.fork(count=2, timeout=LIFETIME)
    assert len({f.sandbox_id for f in forks} | {sbx.sandbox_id}) == 3
    try:
        for i, fork in enumerate(forks):
            assert fork.run_code(f"x.append({i}); x").text == f"[1, {i}]"
            assert fork.files.read("kept") == "before"
            assert fork.files.read("/run/e2b/.E2B_SANDBOX_ID") == fork.sandbox_id
        assert sbx.run_code("x").text == "[1]"
    finally:
        for fork in forks:
            fork.kill()


@pytest.mark.proves("Sandbox.fork")
def test_what_cannot_be_forked_is_told(make):
    with pytest.raises(SandboxNotFoundException):
        Sandbox.fork("nonexistingsandbox")
    sbx = make()
    sbx.pause()
    with pytest.raises(Exception, match="409"):
        sbx.fork()


@pytest.mark.proves("Sandbox.connect")
def test_a_resume_sets_a_new_deadline(make):
    sbx = make(timeout=300)
    sbx.pause()
    sbx.connect(timeout=2000)
    assert sbx.get_info().end_at.timestamp() - time.time() > 1500
