"""Sandboxes: made, found, kept alive, paused, snapshotted and ended, by the synchronous SDK."""

import os
import pathlib
import signal
import subprocess
import sys
import time
from datetime import datetime, timedelta, timezone

import pytest

from conftest import IMAGE, LIFETIME, NEWEST, eventually, out
from opensandbox import SandboxSync
from opensandbox.config import ConnectionConfigSync
from opensandbox.exceptions import SandboxApiException, SandboxException
from opensandbox.models.execd import RunCommandOpts
from opensandbox.models.sandboxes import PlatformSpec, SandboxFilter, SandboxImageSpec, SnapshotFilter

proves = pytest.mark.proves


def left(info):
    return (info.expires_at - datetime.now(timezone.utc)).total_seconds()


@proves("Sandbox.create", "Sandbox.get_info", "Sandbox.kill")
def test_S3_10_a_created_sandbox_is_ready_at_once(make):
    sbx = make()
    assert isinstance(sbx.id, str) and sbx.id
    assert out(sbx.commands.run("echo ready")) == ["ready"]
    info = sbx.get_info()
    assert info.id == sbx.id
    assert info.status.state == "Running"
    assert info.image.image == IMAGE
    assert info.entrypoint[-3:] == ["tail", "-f", "/dev/null"]
    assert abs((datetime.now(timezone.utc) - info.created_at).total_seconds()) < 300
    sbx.kill()
    with pytest.raises(SandboxApiException) as gone:
        sbx.get_info()
    assert gone.value.status_code == 404
    assert gone.value.error.code and gone.value.error.message


@pytest.mark.parametrize("image", ["opensandbox/code-interpreter", "docker.io/opensandbox/code-interpreter:latest", "python:3.11-slim", "python", "base"])
@proves("Sandbox.create")
def test_S3_4_a_newcomers_first_image_needs_no_registry(make, image):
    sbx = make(image)
    assert out(sbx.commands.run("echo hello")) == ["hello"]
    assert sbx.get_info().image.image == image


@pytest.mark.parametrize("script", ["/opt/code-interpreter/code-interpreter.sh", "/opt/opensandbox/code-interpreter.sh"])
@proves("Sandbox.create")
def test_S3_4_upstreams_image_from_its_mirror_with_its_entrypoint(make, script):
    """Which has moved between two versions of the image."""
    sbx = make("registry.example.com/opensandbox/code-interpreter:v1.1.0", entrypoint=[script], env={"PYTHON_VERSION": "3.11"})
    assert out(sbx.commands.run("python3 -c 'print(6*7)'")) == ["42"]
    assert sbx.get_info().status.state == "Running"


def test_S3_5_the_domain_is_localhost_8080_when_nothing_says_otherwise(monkeypatch):
    monkeypatch.delenv("OPEN_SANDBOX_DOMAIN")
    assert ConnectionConfigSync().get_domain() == "localhost:8080"


@proves("Sandbox.create")
def test_S3_6_without_the_key_nothing_is_made(wire, monkeypatch, tag):
    monkeypatch.delenv("OPEN_SANDBOX_API_KEY")
    for key, code in ((None, "MISSING_API_KEY"), ("wrong", "INVALID_API_KEY")):
        with pytest.raises(SandboxApiException) as refused:
            SandboxSync.create(IMAGE, connection_config=ConnectionConfigSync(api_key=key), metadata={"run": tag})
        assert refused.value.status_code == 401
        assert refused.value.error.code == code
    assert wire.made(tag) == 0
    sbx = SandboxSync.create(IMAGE, connection_config=ConnectionConfigSync(api_key=wire.key), timeout=LIFETIME)
    sbx.kill()
    sbx.close()


def test_S3_6_another_tenant_sees_nothing(sandbox, wire):
    key = os.environ["OPENSANDBOX_SUITE_FOREIGN_KEY"]
    assert sandbox.id not in wire.api("GET", "/sandboxes?pageSize=200", key=key).text
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/pause"), ("GET", "/endpoints/44772"), ("POST", "/snapshots"), ("GET", "/proxy/44772/ping")):
        answer = wire.api(method, f"/sandboxes/{sandbox.id}{path}", key=key)
        missing = wire.api(method, f"/sandboxes/{'x' * len(sandbox.id)}{path}", key=key)
        assert answer.status_code == missing.status_code == 404, (method, path, answer.text)
        assert answer.json()["code"] == missing.json()["code"]
    assert sandbox.is_healthy()


@proves("Sandbox.create")
def test_S3_12_a_create_that_fails_raises_and_leaves_nothing(wire, tag):
    with pytest.raises(SandboxException) as failed:
        SandboxSync.create(SandboxImageSpec(f"127.0.0.1:1/{tag}:none"), timeout=LIFETIME, metadata={"run": tag})
    assert "127.0.0.1:1" in str(failed.value)
    assert wire.made(tag) == 0


@proves("Sandbox.connect")
def test_S3_38_a_sandbox_is_reached_again_by_its_id(make, tag):
    first = make()
    first.files.write_file("/tmp/kept", tag)
    first.close()
    again = SandboxSync.connect(first.id)
    assert again.files.read_file("/tmp/kept") == tag
    again.close()
    with pytest.raises(SandboxApiException) as missing:
        SandboxSync.connect("00000000-0000-0000-0000-000000000000")
    assert missing.value.status_code == 404


@proves("Sandbox.close", "Sandbox.kill")
def test_S3_32_close_keeps_the_sandbox_and_kill_ends_it(make, manager):
    sbx = make()
    sbx.close()
    assert manager.get_sandbox_info(sbx.id).status.state == "Running"
    manager.kill_sandbox(sbx.id)
    with pytest.raises(SandboxApiException):
        manager.get_sandbox_info(sbx.id)


@proves("Sandbox.kill", "SandboxManager.kill_sandbox")
def test_S3_33_a_second_kill_is_a_typed_not_found(make):
    sbx = make()
    sbx.kill()
    with pytest.raises(SandboxApiException) as gone:
        sbx.kill()
    assert gone.value.status_code == 404
    assert gone.value.error.code == "DOCKER::SANDBOX_NOT_FOUND"


@proves("Sandbox.kill", "SandboxManager.kill_sandbox")
def test_S3_33_a_kill_after_expiry_is_a_typed_not_found(make, manager, wire):
    sbx = make()
    sbx.renew(timedelta(seconds=1))
    eventually(lambda: wire.api("GET", f"/sandboxes/{sbx.id}").status_code == 404)
    for kill in (sbx.kill, lambda: manager.kill_sandbox(sbx.id)):
        with pytest.raises(SandboxApiException) as gone:
            kill()
        assert gone.value.status_code == 404
        assert gone.value.error.code == "DOCKER::SANDBOX_NOT_FOUND"


@proves("Sandbox.destroy")
@pytest.mark.newest
def test_destroy_ends_it_and_closes_the_connection(make, manager):
    sbx = make()
    sbx.destroy()
    with pytest.raises(SandboxApiException):
        manager.get_sandbox_info(sbx.id)


CLIENT = """
import os, signal, sys
from datetime import timedelta
from opensandbox import SandboxSync
SandboxSync.create(sys.argv[1], timeout=timedelta(seconds=20), metadata={"run": sys.argv[2]})
os.kill(os.getpid(), signal.SIGKILL)
"""


@proves("Sandbox.create")
def test_S3_35_a_client_that_is_killed_before_its_first_use_leaves_nothing_for_long(wire, tag):
    began = time.monotonic()
    died = subprocess.run([sys.executable, "-B", "-c", CLIENT, IMAGE, tag], check=False, timeout=600)
    assert died.returncode == -signal.SIGKILL
    assert time.monotonic() - began > 20 or wire.made(tag) == 1  # nobody knows of it, and there it is
    eventually(lambda: wire.made(tag) == 0)


@proves("Sandbox.renew")
def test_S3_35_by_default_it_is_ten_minutes(wire):
    sbx = SandboxSync.create(IMAGE)  # the SDK's own default: ten minutes
    info = sbx.get_info()
    assert 590 <= (info.expires_at - info.created_at).total_seconds() <= 700
    sbx.renew(timedelta(seconds=1.5))
    sbx.close()
    eventually(lambda: wire.api("GET", f"/sandboxes/{sbx.id}").status_code == 404)


@proves("Sandbox.renew", "SandboxManager.renew_sandbox")
def test_renew_moves_the_deadline_both_ways(make, manager):
    sbx = make(timeout=timedelta(minutes=5))
    answer = sbx.renew(timedelta(minutes=20))
    assert 18 * 60 < left(sbx.get_info()) < 22 * 60
    assert abs((answer.expires_at - sbx.get_info().expires_at).total_seconds()) < 2
    manager.renew_sandbox(sbx.id, timedelta(minutes=2))
    assert left(sbx.get_info()) < 125


@proves("Sandbox.create", "Sandbox.renew")
def test_S3_43_without_a_timeout_it_stays_until_it_is_killed(make):
    sbx = make(timeout=None)
    assert sbx.get_info().expires_at is None
    with pytest.raises(SandboxApiException) as refused:
        sbx.renew(timedelta(minutes=5))
    assert refused.value.status_code == 409


@proves("Sandbox.create")
def test_S3_44_limits_are_what_was_asked_for(make):
    metrics = make().get_metrics()  # tells the limits, not the host's size
    assert metrics.cpu_count == 1
    assert metrics.memory_total_in_mib == 2048
    small = make(resource={"cpu": "500m", "memory": "128Mi"}).get_metrics()
    assert small.cpu_count == 0.5
    assert small.memory_total_in_mib == 128


def limits_on_the_host(sbx, tag):
    """What the host's kernel holds a sandbox's processes to, as (processors, bytes): of the cgroups that one of them is in."""
    sbx.commands.run(f"exec -a {tag} sleep 600", opts=RunCommandOpts(background=True))

    def found():
        for entry in pathlib.Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and (entry / "cmdline").read_bytes().startswith(tag.encode() + b"\0"):
                    return entry
            except OSError:  # it has ended meanwhile
                continue
        return None

    root, groups = pathlib.Path("/sys/fs/cgroup"), {}
    for text in (eventually(found) / "cgroup").read_text().splitlines():
        _, controllers, path = text.split(":", 2)
        groups |= {name: path.lstrip("/") for name in controllers.split(",")}
    if "memory" not in groups:  # one hierarchy for all
        at = root / groups[""]
        quota, period = above(at, "cpu.max").split()
        return int(quota) / int(period), int(above(at, "memory.max"))
    cpu, memory = root / "cpu" / groups["cpu"], root / "memory" / groups["memory"]
    return int(above(cpu, "cpu.cfs_quota_us")) / int(above(cpu, "cpu.cfs_period_us")), int(above(memory, "memory.limit_in_bytes"))


def above(group, name):
    """The nearest limit on the way up: a sandbox may have groups of its own below the one with the limit."""
    while True:
        try:
            text = (group / name).read_text().strip()
        except FileNotFoundError:
            text = "max"
        if not text.startswith(("max", "-1")) and int(text.split()[0]) < 1 << 60:
            return text
        assert group != group.parent
        group = group.parent


@proves("Sandbox.create")
def test_S3_44_the_hosts_kernel_has_the_limits(make, tag):
    assert limits_on_the_host(make(), tag) == (1, 2 << 30)
    assert limits_on_the_host(make(resource={"cpu": "500m", "memory": "128Mi"}), tag + "small") == (0.5, 128 << 20)


@proves("Sandbox.create")
def test_S3_44_the_processor_limit_is_felt_inside(make):
    sbx = make(resource={"cpu": "200m", "memory": "128Mi"})
    script = "import time; began, used = time.monotonic(), time.process_time()\nwhile time.monotonic() - began < 2: pass\nprint((time.process_time() - used) / 2)"
    sbx.files.write_file("/tmp/busy.py", script)
    assert float(out(sbx.commands.run("python3 /tmp/busy.py"))[0]) < 0.35
    assert out(sbx.commands.run("cut -d: -f3 /proc/self/cgroup | sort -u")) == ["/"]  # and no other's groups are seen


@proves("Sandbox.create")
def test_S3_44_the_memory_limit_holds(make):
    sbx = make(resource={"cpu": "1", "memory": "128Mi"})
    hungry = sbx.commands.run("python3 -c 'x = bytearray(400 << 20); print(len(x))'")
    assert hungry.error is not None and out(hungry) == []
    assert out(sbx.commands.run("echo alive")) == ["alive"]


@proves("Sandbox.create")
def test_a_small_sandbox_works(make):
    sbx = make(resource={"cpu": "100m", "memory": "64Mi"})
    assert out(sbx.commands.run("echo small")) == ["small"]


@proves("Sandbox.create")
def test_S3_45_variables_of_the_sandbox_are_in_its_commands(make):
    sbx = make(env={"GREETING": "hello there", "EMPTY": ""})
    assert out(sbx.commands.run('echo "$GREETING|$EMPTY|"')) == ["hello there||"]


@proves("Sandbox.create", "SandboxManager.list_sandbox_infos")
def test_S3_46_metadata_is_kept_and_filters_lists(make, manager, tag):
    a = make(metadata={"run": tag, "which": "a", "example.com/team": "x.y_z"})
    b = make(metadata={"run": tag, "which": "b"})
    assert a.get_info().metadata == {"run": tag, "which": "a", "example.com/team": "x.y_z"}

    def ids(**kw):
        return [i.id for i in manager.list_sandbox_infos(SandboxFilter(**kw)).sandbox_infos]

    assert ids(metadata={"run": tag}) == [b.id, a.id]
    assert ids(metadata={"run": tag, "which": "a"}) == [a.id]
    assert ids(metadata={"run": tag, "which": "c"}) == []
    assert ids(metadata={"run": tag}, states=["Running", "Paused"]) == [b.id, a.id]
    assert ids(metadata={"run": tag}, states=["Paused"]) == []
    page = manager.list_sandbox_infos(SandboxFilter(metadata={"run": tag}, page=2, page_size=1))
    assert [i.id for i in page.sandbox_infos] == [a.id]
    assert (page.pagination.total_items, page.pagination.total_pages, page.pagination.has_next_page) == (2, 2, False)


@proves("Sandbox.patch_metadata", "SandboxManager.patch_sandbox_metadata")
def test_metadata_is_patched_key_by_key(make, manager, tag):
    sbx = make(metadata={"keep": "1", "drop": "2"})
    assert sbx.patch_metadata({"drop": None, "new": tag}).metadata == {"keep": "1", "new": tag}
    assert manager.patch_sandbox_metadata(sbx.id, {"keep": "3"}).metadata == {"keep": "3", "new": tag}
    assert sbx.get_info().metadata == {"keep": "3", "new": tag}
    with pytest.raises(SandboxApiException) as refused:
        sbx.patch_metadata({"opensandbox.io/x": "y"})
    assert (refused.value.status_code, refused.value.error.code) == (400, "SANDBOX::INVALID_METADATA_LABEL")


@proves("Sandbox.pause", "Sandbox.resume", "SandboxManager.pause_sandbox", "SandboxManager.resume_sandbox", "Sandbox.is_healthy")
def test_S3_48_a_pause_keeps_files_and_processes(make, manager, tag):
    sbx = make(metadata={"run": tag})
    sbx.files.write_file("/tmp/kept", tag)
    sbx.commands.run("sleep 1000 & echo $! > /tmp/pid")
    sbx.pause()
    eventually(lambda: sbx.get_info().status.state == "Paused")
    assert not sbx.is_healthy()
    paused = manager.list_sandbox_infos(SandboxFilter(states=["paused"], metadata={"run": tag})).sandbox_infos
    assert [i.id for i in paused] == [sbx.id]
    with pytest.raises(SandboxApiException) as twice:
        sbx.pause()
    assert twice.value.status_code == 409
    again = SandboxSync.resume(sbx.id)
    assert again.files.read_file("/tmp/kept") == tag
    assert again.commands.run("kill -0 $(cat /tmp/pid)").exit_code == 0
    with pytest.raises(SandboxApiException) as running:
        manager.resume_sandbox(sbx.id)
    assert running.value.status_code == 409
    manager.pause_sandbox(sbx.id)
    manager.resume_sandbox(sbx.id)
    assert sbx.is_healthy()
    again.close()


@proves("Sandbox.create_snapshot", "Sandbox.create", "SandboxManager.get_snapshot", "SandboxManager.list_snapshots", "SandboxManager.delete_snapshot", "SandboxManager.create_snapshot")
def test_a_snapshot_starts_sandboxes_with_its_files(make, manager, tag):
    sbx = make()
    sbx.files.write_file("/srv/data.txt", tag)
    shot = sbx.create_snapshot(name=tag)
    assert (shot.sandbox_id, shot.name) == (sbx.id, tag)
    ready = eventually(lambda: (s := manager.get_snapshot(shot.id)).status.state == "Ready" and s)
    assert ready.created_at == shot.created_at
    listed = manager.list_snapshots(SnapshotFilter(sandbox_id=sbx.id))
    assert [s.id for s in listed.snapshot_infos] == [shot.id]
    if NEWEST:
        assert [s.id for s in manager.list_snapshots(SnapshotFilter(name=tag)).snapshot_infos] == [shot.id]
        assert manager.list_snapshots(SnapshotFilter(name=tag + "x")).snapshot_infos == []
    born = make(snapshot_id=shot.id)
    assert born.files.read_file("/srv/data.txt") == tag
    assert born.get_info().snapshot_id == shot.id
    second = manager.create_snapshot(born.id)
    eventually(lambda: manager.get_snapshot(second.id).status.state == "Ready")
    for each in (shot, second):
        manager.delete_snapshot(each.id)
        with pytest.raises(SandboxApiException) as gone:
            manager.get_snapshot(each.id)
        assert gone.value.error.code == "SNAPSHOT::NOT_FOUND"
    with pytest.raises(SandboxApiException):
        make(snapshot_id=shot.id)
    assert born.files.read_file("/srv/data.txt") == tag


@proves("Sandbox.get_metrics")
def test_metrics_are_numbers_that_make_sense(sandbox):
    m = sandbox.get_metrics()
    assert m.cpu_count > 0 and 0 <= m.cpu_used_percentage <= 100
    assert 0 < m.memory_used_in_mib <= m.memory_total_in_mib
    assert abs(m.timestamp / 1000 - datetime.now().timestamp()) < 120


@proves("Sandbox.get_diagnostic_logs", "Sandbox.get_diagnostic_events", "SandboxManager.get_diagnostic_logs", "SandboxManager.get_diagnostic_events")
def test_diagnostics_tell_what_the_entrypoint_said_and_what_happened(make, manager):
    sbx = make(entrypoint=["sh", "-c", "echo from the entrypoint; exec sleep 1000"])
    logs = eventually(lambda: (d := sbx.get_diagnostic_logs("container")).content and d)
    assert "from the entrypoint" in logs.content
    events = manager.get_diagnostic_events(sbx.id, "all")
    assert (events.sandbox_id, events.kind, events.delivery) == (sbx.id, "events", "inline")
    assert "from the entrypoint" in manager.get_diagnostic_logs(sbx.id, "all").content
    assert sbx.get_diagnostic_events("lifecycle").content


@proves("Sandbox.create")
def test_the_entrypoint_runs_and_its_end_is_the_sandboxs(make, wire):
    sbx = make(entrypoint=["sh", "-c", "touch /tmp/begun; exec sleep 1000"])
    eventually(lambda: sbx.commands.run("test -e /tmp/begun").exit_code == 0)
    wait = "until [ -e /tmp/end ]; do sleep 0.1; done; exit"  # for the SDK, which looks whether the sandbox is ready
    fails = make(entrypoint=["sh", "-c", f"{wait} 3"])
    fails.files.write_file("/tmp/end", "")
    assert eventually(lambda: (s := wire.api("GET", f"/sandboxes/{fails.id}").json()["status"])["state"] == "Failed" and s)["reason"] == "CONTAINER_EXITED_ERROR"
    ends = make(entrypoint=["sh", "-c", f"{wait} 0"])
    ends.files.write_file("/tmp/end", "")
    eventually(lambda: wire.api("GET", f"/sandboxes/{ends.id}").json()["status"]["state"] == "Terminated")


@proves("Sandbox.create")
def test_the_platform_of_this_host_is_accepted_and_no_other(make):
    machine = {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine]
    other = {"amd64": "arm64", "arm64": "amd64"}[machine]
    assert make(platform=PlatformSpec(os="linux", arch=machine)).get_info().platform.arch == machine
    for platform in (PlatformSpec(os="linux", arch=other), PlatformSpec(os="windows", arch=machine)):
        with pytest.raises(SandboxApiException) as refused:
            make(platform=platform)
        assert refused.value.status_code == 400


@proves("Sandbox.create")
def test_renew_on_access_moves_the_deadline(make):
    sbx = make(timeout=timedelta(minutes=2), extensions={"access.renew.extend.seconds": "600"})
    assert left(sbx.get_info()) < 125  # that the SDK looked whether it is there is no use
    sbx.commands.run("true")
    eventually(lambda: left(sbx.get_info()) > 500)


@proves("Sandbox.create")
def test_what_is_not_made_yet_is_refused_with_a_sentence(make):
    cases = [
        ({"extensions": {"poolRef": "p"}}, 400),
        ({"extensions": {"access.renew.extend.seconds": "12"}}, 400),
        ({"resource": {"cpu": "1", "memory": "1Gi", "gpu": "1"}}, 400),
    ]
    if NEWEST:
        from opensandbox.models.sandboxes import CredentialProxyConfig, NetworkPolicy, PeriodicLifecycleHook, SandboxLifecycle

        cases += [
            ({"credential_proxy": CredentialProxyConfig(enabled=True), "network_policy": NetworkPolicy(defaultAction="allow")}, 400),
            ({"lifecycle": SandboxLifecycle(periodic=[PeriodicLifecycleHook(name="n", schedule="@hourly", command=["true"])])}, 400),
        ]
    for kw, status in cases:
        with pytest.raises(SandboxApiException) as refused:
            make(**kw)
        assert refused.value.status_code in (status, 501), kw
        assert len(refused.value.error.message) > 10, kw


@proves("Sandbox.create")
@pytest.mark.newest
def test_a_hook_runs_before_the_entrypoint(make):
    from opensandbox.models.sandboxes import LifecycleHook, SandboxLifecycle

    hook = LifecycleHook(command=["sh", "-c", "echo $WORD > /tmp/made"], timeoutSeconds=300)
    sbx = make(lifecycle=SandboxLifecycle(preStart=hook), env={"WORD": "hello"}, entrypoint=["sh", "-c", "cp /tmp/made /tmp/found; sleep 600"])
    eventually(lambda: out(sbx.commands.run("cat /tmp/found")) == ["hello"])
    with pytest.raises(SandboxApiException) as refused:
        make(lifecycle=SandboxLifecycle(preStart=LifecycleHook(command=["sh", "-c", "exit 7"])))
    assert refused.value.status_code == 400 and "status 7" in refused.value.error.message


@proves("Sandbox.create_from_template", "SandboxManager.create_template", "SandboxManager.get_template", "SandboxManager.list_templates", "SandboxManager.delete_template")
@pytest.mark.newest
def test_golden_image_templates_are_refused_with_a_sentence(manager):
    from opensandbox.models.templates import TemplateFilter

    for call in (
        lambda: SandboxSync.create_from_template("tpl_x", timeout=LIFETIME),
        lambda: manager.get_template("tpl_x"),
        lambda: manager.list_templates(TemplateFilter()),
        lambda: manager.delete_template("tpl_x"),
    ):
        with pytest.raises(SandboxApiException) as refused:
            call()
        assert refused.value.status_code in (400, 501)
        assert refused.value.error.code and len(refused.value.error.message) > 10


@proves("Sandbox.check_ready")
def test_a_health_check_of_ones_own_decides(make):
    asked = []
    sbx = make(health_check=lambda s: asked.append(s.id) or len(asked) > 2, health_check_polling_interval=timedelta(milliseconds=20))
    assert asked == [sbx.id] * 3
    sbx.check_ready(timedelta(seconds=5), timedelta(milliseconds=10))


@proves("Sandbox.create")
def test_S3_42_a_transport_of_ones_own_stays_open(make):
    import httpx

    transport = httpx.HTTPTransport()
    closed = []
    close = transport.close
    transport.close = lambda: closed.append(True) or close()
    sbx = make(connection_config=ConnectionConfigSync(transport=transport))
    assert out(sbx.commands.run("echo own")) == ["own"]
    sbx.kill()
    sbx.close()
    assert not closed


@proves("Sandbox.create")
def test_S3_7_the_image_that_is_named_is_the_one(make):
    assert make("base").get_info().image.image == "base"
    assert make("base").commands.run("id -u").exit_code == 0


def test_a_request_id_is_given_back(wire):
    answer = wire.api("GET", "/sandboxes/none/endpoints/44772", headers={"X-Request-ID": "asked-1"})
    assert answer.status_code == 404 and answer.headers["x-request-id"] == "asked-1"
    assert wire.api("GET", "/sandboxes").headers["x-request-id"]
    with pytest.raises(SandboxApiException) as missing:
        SandboxSync.connect("none", connection_config=ConnectionConfigSync(headers={"X-Request-ID": "asked-2"}))
    assert missing.value.request_id == "asked-2"
