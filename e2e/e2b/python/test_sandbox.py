"""Making, finding, describing and ending sandboxes."""

import datetime
import os

import pytest
from conftest import eventually

from e2b import (
    E2B,
    AuthenticationException,
    NotFoundException,
    Sandbox,
    SandboxException,
    SandboxNotFoundException,
    SandboxQuery,
    SandboxState,
    TimeoutException,
)


def gone(sbx):
    """Whether the control plane no longer knows a sandbox: is_running asks the sandbox itself, and fails while it ends."""
    try:
        sbx.get_info()
    except NotFoundException:
        return True
    return False


@pytest.mark.proves("Sandbox.create")
def test_S0_1_S0_2_S0_7_a_sandbox_works_as_soon_as_it_is_created(make):
    sbx = make()
    assert sbx.sandbox_id.isalnum() and sbx.sandbox_id == sbx.sandbox_id.lower()
    assert sbx.commands.run("echo ready").stdout == "ready\n"


@pytest.mark.proves("Sandbox.create")
def test_S0_10_S0_11_two_sandboxes_have_two_ids_and_two_disks(make):
    a, b = make(), make()
    assert a.sandbox_id != b.sandbox_id
    a.files.write("only-here", "x")
    assert not b.files.exists("only-here")


@pytest.mark.proves("Sandbox.create")
def test_envs_reach_every_command(make):
    sbx = make(envs={"COLOUR": "blue green", "EMPTY": ""})
    assert sbx.commands.run('echo "$COLOUR"').stdout == "blue green\n"
    assert sbx.commands.run('echo "${EMPTY-unset}"').stdout == "\n"


@pytest.mark.proves("Sandbox.create")
def test_a_sandbox_knows_what_it_is(make):
    sbx = make()
    out = sbx.commands.run("echo $E2B_SANDBOX $E2B_SANDBOX_ID $E2B_TEMPLATE_ID").stdout.split()
    assert out[:2] == ["true", sbx.sandbox_id]
    assert len(out) == 3
    # The same in files, for what does not have the environment.
    names = [f"/run/e2b/.{name}" for name in ("E2B_SANDBOX", "E2B_SANDBOX_ID", "E2B_TEMPLATE_ID")]
    assert [sbx.files.read(name) for name in names] == out
    assert sbx.commands.run(f"stat -c '%U %a' {names[1]}; sudo cat {names[1]}").stdout == "root 644\n" + sbx.sandbox_id


@pytest.mark.proves("Sandbox.create", "Sandbox.get_info")
def test_info_shows_what_was_asked_for(make, tag):
    sbx = make(metadata={"owner": tag, "sp ace": "a=b&c"}, timeout=777)
    info = sbx.get_info()
    assert info.sandbox_id == sbx.sandbox_id
    assert info.metadata == {"owner": tag, "sp ace": "a=b&c"}
    assert info.state == SandboxState.RUNNING
    assert info.name == "base"
    assert info.template_id
    assert info.cpu_count >= 1 and info.memory_mb >= 128
    assert info.lifecycle == {"on_timeout": "kill", "auto_resume": False}
    lifetime = (info.end_at - info.started_at).total_seconds()
    assert 770 <= lifetime <= 900
    assert Sandbox.get_info(sbx.sandbox_id).sandbox_id == sbx.sandbox_id


@pytest.mark.proves("Sandbox.create")
def test_S0_15_without_a_timeout_a_sandbox_lives_five_minutes():
    sbx = Sandbox.create()
    try:
        info = sbx.get_info()
        assert 295 <= (info.end_at - info.started_at).total_seconds() <= 400
    finally:
        sbx.kill()


@pytest.mark.proves("Sandbox.create")
def test_a_retry_with_the_same_idempotency_key_makes_no_second_sandbox(make, tag):
    a = make(idempotency_key=tag, metadata={"k": tag})
    b = make(idempotency_key=tag, metadata={"k": tag})
    assert a.sandbox_id == b.sandbox_id


@pytest.mark.proves("Sandbox.create", "Sandbox.kill")
def test_S0_8_S0_9_leaving_a_with_block_ends_the_sandbox():
    with Sandbox.create(timeout=600) as sbx:
        assert sbx.is_running()
    assert not sbx.is_running()
    with pytest.raises(RuntimeError):
        with Sandbox.create(timeout=600) as sbx:
            raise RuntimeError("user's own")
    assert not sbx.is_running()


@pytest.mark.proves("Sandbox.kill")
def test_S0_12_kill_says_whether_there_was_anything_to_kill(make):
    sbx = make()
    assert sbx.kill() is True
    assert sbx.kill() is False
    assert Sandbox.kill(sbx.sandbox_id) is False
    assert Sandbox.kill("nonexistingsandbox") is False
    assert Sandbox.kill("an-id-that-never-was") is False


@pytest.mark.proves("Sandbox.kill")
def test_kill_by_id(make):
    sbx = make()
    assert Sandbox.kill(sbx.sandbox_id) is True
    assert not sbx.is_running()


@pytest.mark.proves("Sandbox.is_running")
def test_is_running_follows_the_sandbox(make):
    sbx = make()
    assert sbx.is_running() is True
    sbx.kill()
    assert sbx.is_running() is False


@pytest.mark.proves("Sandbox.get_info")
def test_info_of_a_killed_or_unknown_sandbox_is_not_found(make):
    sbx = make()
    sbx.kill()
    with pytest.raises(SandboxNotFoundException):
        sbx.get_info()
    with pytest.raises(NotFoundException):
        Sandbox.get_info("nonexistingsandbox")


@pytest.mark.slow
@pytest.mark.proves("Sandbox.set_timeout")
def test_a_sandbox_ends_at_the_timeout_that_was_set(make):
    sbx = make()
    sbx.set_timeout(20)
    assert sbx.is_running()
    eventually(lambda: gone(sbx))
    assert not sbx.is_running()


@pytest.mark.proves("Sandbox.set_timeout")
def test_S0_15_a_timeout_may_be_shortened_and_lengthened(make):
    sbx = make(timeout=1000)
    first = sbx.get_info().end_at
    sbx.set_timeout(300)
    shorter = sbx.get_info().end_at
    Sandbox.set_timeout(sbx.sandbox_id, 2000)
    longer = sbx.get_info().end_at
    assert shorter < first < longer
    with pytest.raises(SandboxNotFoundException):
        Sandbox.set_timeout("nonexistingsandbox", 10)


@pytest.mark.slow
@pytest.mark.proves("Sandbox.create")
def test_S0_14_a_sandbox_ends_by_itself_at_its_timeout(make):
    sbx = make(timeout=20)
    assert sbx.is_running()
    eventually(lambda: gone(sbx))
    assert not sbx.is_running()


@pytest.mark.proves("Sandbox.connect")
def test_S0_17_connect_finds_a_running_sandbox(make):
    sbx = make()
    sbx.files.write("note", "from the first client")
    again = Sandbox.connect(sbx.sandbox_id)
    assert again.sandbox_id == sbx.sandbox_id
    assert again.files.read("note") == "from the first client"
    assert sbx.connect() is sbx


@pytest.mark.proves("Sandbox.connect")
def test_connect_never_shortens_a_life(make):
    sbx = make(timeout=1000)
    before = sbx.get_info().end_at
    Sandbox.connect(sbx.sandbox_id, timeout=100)
    assert sbx.get_info().end_at == before
    Sandbox.connect(sbx.sandbox_id, timeout=3000)
    assert sbx.get_info().end_at > before


@pytest.mark.proves("Sandbox.connect")
def test_connect_to_nothing_is_not_found(make):
    sbx = make()
    sbx.kill()
    with pytest.raises(NotFoundException):
        Sandbox.connect(sbx.sandbox_id)
    with pytest.raises(NotFoundException):
        Sandbox.connect("nonexistingsandbox")


@pytest.mark.proves("Sandbox.list")
def test_S0_18_S0_79_a_list_filters_by_metadata(make, tag):
    odd = {"id": tag, "what & that": "50% = half+more, ünïcode"}
    sbx = make(metadata=odd)
    make(metadata={"id": tag})
    got = Sandbox.list(query=SandboxQuery(metadata=odd)).next_items()
    assert [s.sandbox_id for s in got] == [sbx.sandbox_id]
    assert got[0].metadata == odd
    assert got[0].state == SandboxState.RUNNING
    assert Sandbox.list(query=SandboxQuery(metadata={"id": tag + "x"})).next_items() == []


@pytest.mark.proves("Sandbox.list")
def test_a_list_comes_in_pages_newest_first(make, tag):
    made = [make(metadata={"id": tag}).sandbox_id for _ in range(3)]
    pages = Sandbox.list(query=SandboxQuery(metadata={"id": tag}), limit=1)
    got = []
    while pages.has_next:
        page = pages.next_items()
        assert len(page) == 1
        got.append(page[0].sandbox_id)
    assert got == made[::-1]
    assert not pages.has_next
    with pytest.raises(Exception, match="No more items"):
        pages.next_items()


@pytest.mark.proves("Sandbox.list")
def test_a_list_may_be_oldest_first_and_go_on_from_a_token(make, tag):
    made = [make(metadata={"id": tag}).sandbox_id for _ in range(3)]
    query = SandboxQuery(metadata={"id": tag})
    first = Sandbox.list(query=query, limit=2, order="asc")
    assert [s.sandbox_id for s in first.next_items()] == made[:2]
    rest = Sandbox.list(query=query, limit=2, order="asc", next_token=first.next_token)
    assert [s.sandbox_id for s in rest.next_items()] == made[2:]
    assert not rest.has_next


@pytest.mark.proves("Sandbox.list")
def test_a_list_filters_by_state(make, tag):
    running, paused = make(metadata={"id": tag}), make(metadata={"id": tag})
    paused.pause()

    def ids(*states):
        query = SandboxQuery(metadata={"id": tag}, state=list(states) or None)
        return {s.sandbox_id for s in Sandbox.list(query=query).next_items()}

    assert ids(SandboxState.RUNNING) == {running.sandbox_id}
    assert ids(SandboxState.PAUSED) == {paused.sandbox_id}
    both = {running.sandbox_id, paused.sandbox_id}
    assert ids(SandboxState.RUNNING, SandboxState.PAUSED) == both
    assert ids() == both


@pytest.mark.proves("Sandbox.list")
def test_a_list_filters_by_start_and_template(make, tag):
    a = make(metadata={"id": tag})
    b = make(metadata={"id": tag})
    started = b.get_info().started_at

    def ids(**kw):
        query = SandboxQuery(metadata={"id": tag}, **kw)
        return [s.sandbox_id for s in Sandbox.list(query=query).next_items()]

    assert ids(started_after=started) == [b.sandbox_id]
    assert ids(started_after=started + datetime.timedelta(seconds=1)) == []
    assert ids(template="base") == [b.sandbox_id, a.sandbox_id]
    assert ids(template="no-such-template") == []


@pytest.mark.proves("Sandbox.list")
def test_what_was_killed_is_not_listed(make, tag):
    sbx = make(metadata={"id": tag})
    sbx.kill()
    assert Sandbox.list(query=SandboxQuery(metadata={"id": tag})).next_items() == []


@pytest.mark.slow
@pytest.mark.proves("Sandbox.get_metrics")
def test_S0_80_metrics_lie_in_the_window_that_was_asked_for(make):
    sbx = make()
    begun = datetime.datetime.now(datetime.timezone.utc)
    samples = eventually(sbx.get_metrics, every=0.5)
    one = samples[0]
    assert one.cpu_count >= 1 and 0 <= one.cpu_used_pct <= 100
    assert 0 < one.mem_used <= one.mem_total
    assert 0 < one.disk_used <= one.disk_total
    assert one.mem_cache >= 0
    slack = datetime.timedelta(seconds=10)
    end = datetime.datetime.now(datetime.timezone.utc)
    for sample in sbx.get_metrics(start=begun, end=end):
        assert begun - slack <= sample.timestamp <= end + slack
    hour = datetime.timedelta(hours=1)
    assert sbx.get_metrics(start=begun - 2 * hour, end=begun - hour) == []
    assert Sandbox.get_metrics(sbx.sandbox_id)
    with pytest.raises(SandboxNotFoundException):
        Sandbox.get_metrics("nonexistingsandbox")


@pytest.mark.proves("Sandbox.get_host", "Sandbox.get_mcp_url")
def test_names_of_hosts_are_made_from_the_id(sandbox):
    domain = os.environ.get("E2B_DOMAIN", "e2b.app")
    assert sandbox.get_host(3000).startswith(f"3000-{sandbox.sandbox_id}.")
    assert sandbox.get_host(3000).endswith(sandbox.sandbox_domain)
    assert sandbox.sandbox_domain == domain or "E2B_DOMAIN" not in os.environ
    assert sandbox.get_mcp_url().startswith(f"https://50005-{sandbox.sandbox_id}.")


@pytest.mark.proves("E2B")
def test_a_client_object_carries_its_own_key():
    client = E2B(api_key=os.environ["E2B_API_KEY"])
    sbx = client.Sandbox.create(timeout=600)
    assert client.Sandbox.kill(sbx.sandbox_id) is True
    with pytest.raises(AuthenticationException):
        E2B(api_key="e2b_" + "0" * 40).Sandbox.create()


@pytest.mark.proves("Sandbox.create")
def test_S0_3_a_wrong_key_is_refused_and_makes_nothing(tag):
    with pytest.raises(AuthenticationException, match="401"):
        Sandbox.create(api_key="e2b_" + "0" * 40, metadata={"id": tag})
    assert Sandbox.list(query=SandboxQuery(metadata={"id": tag})).next_items() == []


@pytest.mark.proves("Sandbox.create")
def test_an_unknown_template_is_told():
    with pytest.raises(SandboxException, match="404.*no-such-template"):
        Sandbox.create("no-such-template")


@pytest.mark.parametrize("timeout", [-1, 10**9])
@pytest.mark.proves("Sandbox.create")
def test_an_absurd_timeout_is_refused(timeout):
    with pytest.raises(SandboxException, match="400"):
        Sandbox.create(timeout=timeout)


@pytest.mark.proves("Sandbox.kill", "commands.run")
def test_S0_28_what_is_asked_of_a_killed_sandbox_fails_as_not_running(make):
    sbx = make()
    sbx.kill()
    with pytest.raises(TimeoutException, match="not found"):
        sbx.commands.run("true")
    with pytest.raises(TimeoutException, match="not found"):
        sbx.files.read("/etc/hostname")
    with pytest.raises(TimeoutException, match="not found"):
        sbx.files.list("/")


@pytest.mark.proves("Sandbox.kill", "CommandHandle.wait")
def test_a_kill_cuts_the_commands_that_run(make):
    sbx = make()
    handle = sbx.commands.run("echo begun; sleep 60", background=True)
    seen = iter(handle)
    assert next(seen)[0] == "begun\n"
    sbx.kill()
    with pytest.raises(TimeoutException, match="killed or reached its end of life"):
        handle.wait()
