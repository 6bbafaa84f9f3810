"""The asynchronous SDK: the same promises, and many sandboxes in one event loop."""

import asyncio
import os
import time
from datetime import timedelta

import pytest

from conftest import IMAGE, LIFETIME, NEWEST, aeventually, out
from opensandbox import Sandbox
from opensandbox.exceptions import SandboxApiException
from opensandbox.models.sandboxes import NetworkPolicy, NetworkRule, SandboxFilter, SnapshotFilter

proves = pytest.mark.proves


@proves("Sandbox.create", "Sandbox.get_info", "Sandbox.is_healthy", "Sandbox.kill", "Sandbox.close", "SandboxManager.get_sandbox_info")
async def test_the_life_of_a_sandbox(amake, amanager):
    sbx = await amake()
    assert await sbx.is_healthy()
    info = await sbx.get_info()
    assert (info.status.state, info.image.image) == ("Running", IMAGE)
    await sbx.close()
    assert (await amanager.get_sandbox_info(sbx.id)).id == sbx.id
    again = await Sandbox.connect(sbx.id)
    await again.kill()
    with pytest.raises(SandboxApiException) as gone:
        await amanager.get_sandbox_info(sbx.id)
    assert gone.value.status_code == 404
    await again.close()


@proves("Sandbox.create")
async def test_S3_41_twenty_sandboxes_in_one_loop(wire):
    async def one(i):
        sbx = await Sandbox.create(IMAGE, timeout=LIFETIME)
        try:
            return out(await sbx.commands.run(f"echo {i}"))
        finally:
            await sbx.kill()
            await sbx.close()

    assert await asyncio.gather(*(one(i) for i in range(20))) == [[str(i)] for i in range(20)]


@proves("Sandbox.connect", "Sandbox.renew", "Sandbox.patch_metadata", "Sandbox.get_metrics", "SandboxManager.list_sandbox_infos", "SandboxManager.renew_sandbox", "SandboxManager.patch_sandbox_metadata", "SandboxManager.kill_sandbox")
async def test_the_same_by_the_manager(amake, amanager, tag):
    sbx = await amake(metadata={"run": tag})
    assert [i.id for i in (await amanager.list_sandbox_infos(SandboxFilter(metadata={"run": tag}))).sandbox_infos] == [sbx.id]
    answer = await sbx.renew(timedelta(minutes=20))
    assert abs((answer.expires_at - (await sbx.get_info()).expires_at).total_seconds()) < 2
    await amanager.renew_sandbox(sbx.id, timedelta(minutes=3))
    assert (await sbx.patch_metadata({"run": None, "b": "c"})).metadata == {"b": "c"}
    assert (await amanager.patch_sandbox_metadata(sbx.id, {"d": "e"})).metadata == {"b": "c", "d": "e"}
    assert (await sbx.get_metrics()).cpu_count == 1
    again = await Sandbox.connect(sbx.id)
    assert out(await again.commands.run("echo again")) == ["again"]
    await again.close()
    await amanager.kill_sandbox(sbx.id)


@proves("Sandbox.pause", "Sandbox.resume", "SandboxManager.pause_sandbox", "SandboxManager.resume_sandbox")
async def test_pause_and_resume(amake, amanager):
    sbx = await amake()
    await sbx.files.write_file("/tmp/kept", "kept")
    await sbx.pause()
    assert (await sbx.get_info()).status.state == "Paused"
    began = time.monotonic()
    assert not await sbx.is_healthy()
    assert time.monotonic() - began < 20
    again = await Sandbox.resume(sbx.id)
    assert await again.files.read_file("/tmp/kept") == "kept"
    await again.close()
    await amanager.pause_sandbox(sbx.id)
    await amanager.resume_sandbox(sbx.id)
    assert await sbx.is_healthy()


@proves("Sandbox.create_snapshot", "SandboxManager.create_snapshot", "SandboxManager.get_snapshot", "SandboxManager.list_snapshots", "SandboxManager.delete_snapshot")
async def test_snapshots(amake, amanager, tag):
    sbx = await amake()
    await sbx.files.write_file("/srv/kept", tag)
    shot = await sbx.create_snapshot(name=tag)

    async def ready():
        return (await amanager.get_snapshot(shot.id)).status.state == "Ready"

    await aeventually(ready)
    assert [s.id for s in (await amanager.list_snapshots(SnapshotFilter(sandbox_id=sbx.id))).snapshot_infos] == [shot.id]
    born = await amake(snapshot_id=shot.id)
    assert await born.files.read_file("/srv/kept") == tag
    await born.kill()
    await amanager.delete_snapshot(shot.id)
    with pytest.raises(SandboxApiException):
        await amanager.get_snapshot(shot.id)
    second = await amanager.create_snapshot(sbx.id)
    await amanager.get_snapshot(second.id)

    async def deleted():
        try:
            await amanager.delete_snapshot(second.id)
        except SandboxApiException as busy:
            assert busy.status_code == 409
            return False
        return True

    await aeventually(deleted)


@proves("Sandbox.get_egress_policy", "Sandbox.patch_egress_rules", "Sandbox.delete_egress_rules")
async def test_the_egress_policy(amake):
    sbx = await amake(network_policy=NetworkPolicy(defaultAction="deny", egress=[NetworkRule(action="allow", target="192.0.2.1")]))
    await sbx.patch_egress_rules([NetworkRule(action="allow", target="198.51.100.0/24")])
    await sbx.delete_egress_rules(["192.0.2.1"])
    policy = await sbx.get_egress_policy()
    assert (policy.default_action, [r.target for r in policy.egress]) == ("deny", ["198.51.100.0/24"])


@proves("Sandbox.get_endpoint", "Sandbox.get_signed_endpoint")
async def test_endpoints(asandbox, wire):
    endpoint = await asandbox.get_endpoint(44772)
    assert endpoint.endpoint.endswith("/44772") and wire.at(endpoint, "GET", "/ping").status_code == 200
    signed = await asandbox.get_signed_endpoint(44772, int(time.time()) + 600)
    assert wire.client.get(f"http://{signed.endpoint}/ping").status_code == 200


@proves("Sandbox.get_diagnostic_logs", "Sandbox.get_diagnostic_events", "SandboxManager.get_diagnostic_logs", "SandboxManager.get_diagnostic_events")
async def test_diagnostics(asandbox, amanager):
    for content in (await asandbox.get_diagnostic_logs("container"), await amanager.get_diagnostic_logs(asandbox.id, "all")):
        assert content.kind == "logs"
    for content in (await asandbox.get_diagnostic_events("all"), await amanager.get_diagnostic_events(asandbox.id, "runtime")):
        assert content.kind == "events"


@proves("Sandbox.check_ready", "Sandbox.destroy")
@pytest.mark.newest
async def test_ready_and_destroyed(amake, amanager):
    assert NEWEST
    sbx = await amake(skip_health_check=True)
    await sbx.check_ready(timedelta(seconds=120), timedelta(milliseconds=20))
    await sbx.destroy()
    with pytest.raises(SandboxApiException):
        await amanager.get_sandbox_info(sbx.id)


@proves("Sandbox.create (image)")
async def test_an_image_from_a_registry(amake):
    sbx = await amake(os.environ["OPENSANDBOX_SUITE_REGISTRY"] + "/busybox:1")
    assert out(await sbx.commands.run("cat /etc/made-by")) == ["the test"]


@proves("Sandbox.create (image)")
async def test_creates_at_once_share_one_pull(amake):
    sandboxes = await asyncio.gather(*(amake(os.environ["OPENSANDBOX_SUITE_REGISTRY"] + "/shared:1") for _ in range(5)))
    assert [out(await s.commands.run("cat /etc/made-by")) for s in sandboxes] == [["the test"]] * 5
    import httpx

    asked = httpx.get(f"http://{os.environ['OPENSANDBOX_SUITE_REGISTRY']}/asked?blobs=shared").text
    assert int(asked) <= 3  # the config and two layers, each once
