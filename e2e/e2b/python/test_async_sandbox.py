"""Every method of the asynchronous SDK once: sandboxes, snapshots, network, templates, the client object."""

import asyncio
import datetime
import os

import httpx
import pytest
from conftest import LIFETIME, aeventually

from e2b import (
    AsyncSandbox,
    AsyncTemplate,
    AuthenticationException,
    E2B,
    NotFoundException,
    SandboxException,
    SandboxNotFoundException,
    SandboxQuery,
    SandboxState,
    TimeoutException,
    wait_for_file,
)


@pytest.mark.proves("Sandbox.create", "Sandbox.get_info", "Sandbox.is_running", "Sandbox.kill")
async def test_a_life(amake, tag):
    sbx = await amake(metadata={"id": tag}, envs={"WORD": "w"})
    assert await sbx.is_running()
    info = await sbx.get_info()
    assert info.metadata == {"id": tag} and info.state == SandboxState.RUNNING
    assert (await sbx.commands.run("echo $WORD")).stdout == "w\n"
    assert (await AsyncSandbox.get_info(sbx.sandbox_id)).sandbox_id == sbx.sandbox_id
    assert await sbx.kill() is True
    assert await sbx.kill() is False
    assert await AsyncSandbox.kill("nonexistingsandbox") is False
    assert not await sbx.is_running()
    with pytest.raises(SandboxNotFoundException):
        await sbx.get_info()


@pytest.mark.proves("Sandbox.create")
async def test_a_with_block():
    async with await AsyncSandbox.create(timeout=600) as sbx:
        assert await sbx.is_running()
    assert not await sbx.is_running()


@pytest.mark.proves("Sandbox.create")
async def test_many_at_once(amake):
    made = await asyncio.gather(*(amake() for _ in range(10)))
    assert len({s.sandbox_id for s in made}) == 10
    outs = await asyncio.gather(*(s.commands.run(f"echo {i}") for i, s in enumerate(made)))
    assert [o.stdout for o in outs] == [f"{i}\n" for i in range(10)]


@pytest.mark.proves("Sandbox.create")
async def test_what_cannot_be_created():
    with pytest.raises(AuthenticationException):
        await AsyncSandbox.create(api_key="e2b_" + "0" * 40)
    with pytest.raises(SandboxException, match="404"):
        await AsyncSandbox.create("no-such-template")


@pytest.mark.proves("Sandbox.connect", "Sandbox.set_timeout")
async def test_connect_and_timeouts(amake):
    sbx = await amake(timeout=1000)
    before = (await sbx.get_info()).end_at
    again = await AsyncSandbox.connect(sbx.sandbox_id, timeout=100)
    assert (await again.get_info()).end_at == before
    await sbx.connect(timeout=3000)
    assert (await sbx.get_info()).end_at > before
    await sbx.set_timeout(200)
    assert (await sbx.get_info()).end_at < before
    await AsyncSandbox.set_timeout(sbx.sandbox_id, 1000)
    with pytest.raises(NotFoundException):
        await AsyncSandbox.connect("nonexistingsandbox")


@pytest.mark.proves("Sandbox.list")
async def test_a_list_in_pages(amake, tag):
    made = [(await amake(metadata={"id": tag})).sandbox_id for _ in range(2)]
    pages = AsyncSandbox.list(query=SandboxQuery(metadata={"id": tag}), limit=1)
    got = []
    while pages.has_next:
        got += [s.sandbox_id for s in await pages.next_items()]
    assert got == made[::-1]


@pytest.mark.proves("Sandbox.pause", "Sandbox.beta_pause", "Sandbox.connect")
async def test_pause_and_resume(amake):
    sbx = await amake()
    await sbx.files.write("kept", "x")
    assert await sbx.pause() is True
    assert await AsyncSandbox.pause(sbx.sandbox_id) is False
    assert await sbx.beta_pause() is False
    with pytest.raises(TimeoutException):
        await sbx.commands.run("true")
    await sbx.connect(timeout=LIFETIME)
    assert await sbx.files.read("kept") == "x"


@pytest.mark.proves("Sandbox.create_snapshot", "Sandbox.list_snapshots", "Sandbox.delete_snapshot")
async def test_snapshots(amake):
    sbx = await amake()
    await sbx.files.write("kept", "x")
    shot = await sbx.create_snapshot()
    assert await (await amake(shot.snapshot_id)).files.read("kept") == "x"
    assert [s.snapshot_id for s in await sbx.list_snapshots().next_items()] == [shot.snapshot_id]
    assert await AsyncSandbox.delete_snapshot(shot.snapshot_id) is True
    assert await AsyncSandbox.delete_snapshot(shot.snapshot_id) is False


@pytest.mark.proves("Sandbox.fork")
async def test_a_fork(amake):
    sbx = await amake()
    await sbx.files.write("kept", "x")
    (fork,) = await sbx.fork(timeout=LIFETIME)
    assert await fork.files.read("kept") == "x"
    await fork.kill()


@pytest.mark.proves("Sandbox.update_network")
async def test_the_network_changes(amake):
    sbx = await amake()
    await sbx.update_network({"deny_out": ["0.0.0.0/0"], "allow_out": ["1.1.1.1"]})
    assert (await sbx.get_info()).network["allow_out"] == ["1.1.1.1"]
    with pytest.raises(SandboxNotFoundException):
        await AsyncSandbox.update_network("nonexistingsandbox", {})


@pytest.mark.slow
@pytest.mark.proves("Sandbox.get_metrics")
async def test_metrics(amake):
    sbx = await amake()
    samples = await aeventually(sbx.get_metrics, 30, 0.5)
    assert samples[0].mem_total > 0
    old = datetime.datetime.now(datetime.timezone.utc) - datetime.timedelta(hours=2)
    assert await sbx.get_metrics(start=old, end=old + datetime.timedelta(hours=1)) == []


@pytest.mark.proves("Sandbox.get_host", "Sandbox.get_mcp_url", "Sandbox.download_url", "Sandbox.upload_url")
async def test_urls(asandbox, afolder):
    assert asandbox.get_host(80).startswith(f"80-{asandbox.sandbox_id}.")
    assert asandbox.get_mcp_url().endswith("/mcp")
    async with httpx.AsyncClient() as http:
        up = await http.post(asandbox.upload_url(f"{afolder}/f"), files={"file": b"sent"})
        assert up.status_code == 200
        assert (await http.get(asandbox.download_url(f"{afolder}/f", use_signature_expiration=60))).text == "sent"


@pytest.mark.proves("Sandbox.get_mcp_token")
async def test_no_mcp_token(asandbox):
    with pytest.raises(Exception, match="does not exist"):
        await asandbox.get_mcp_token()


@pytest.mark.proves("E2B")
async def test_the_client_object():
    client = E2B(api_key=os.environ["E2B_API_KEY"])
    sbx = await client.AsyncSandbox.create(timeout=600)
    assert await client.AsyncSandbox.kill(sbx.sandbox_id) is True


@pytest.mark.proves(
    "Template.build", "Template.build_in_background", "Template.get_build_status", "Template.exists", "Template.alias_exists",
    "Template.assign_tags", "Template.get_tags", "Template.remove_tags", "Template.from_template", "Template.run_cmd",
)
async def test_templates(amake, tag):
    logs = []
    template = AsyncTemplate().from_template("base").run_cmd("echo built > made")
    info = await AsyncTemplate.build(template, tag, on_build_logs=logs.append)
    assert logs
    assert await AsyncTemplate.exists(tag) and await AsyncTemplate.alias_exists(tag)
    assert await (await amake(tag)).files.read("made") == "built\n"
    await AsyncTemplate.assign_tags(tag, "one")
    assert "one" in [t.tag for t in await AsyncTemplate.get_tags(tag)]
    await AsyncTemplate.remove_tags(tag, "one")
    later = await AsyncTemplate.build_in_background(template, tag)

    async def ready():
        return (await AsyncTemplate.get_build_status(later)).status.value == "ready"

    await aeventually(ready, 60, 0.2)
    await AsyncSandbox.delete_snapshot(info.template_id)
    assert not await AsyncTemplate.exists(tag)


@pytest.mark.proves(
    "Template.copy", "Template.copy_items", "Template.set_envs", "Template.set_workdir", "Template.set_user", "Template.make_dir",
    "Template.make_symlink", "Template.rename", "Template.remove", "Template.set_start_cmd", "Template.set_ready_cmd", "Template.skip_cache",
    "Template.from_base_image", "Template.from_dockerfile", "Template.to_json", "Template.to_dockerfile",
)
async def test_every_step_of_a_template(amake, tag, tmp_path):
    (tmp_path / "f").write_text("copied")
    template = (
        AsyncTemplate(file_context_path=str(tmp_path))
        .skip_cache()
        .from_base_image()
        .set_envs({"WORD": "w"})
        .make_dir("/home/user/d")
        .copy("f", "d/")
        .copy_items([{"src": "f", "dest": "/home/user/g"}])
        .make_symlink("/home/user/d/f", "/home/user/link")
        .rename("/home/user/g", "/home/user/h")
        .run_cmd("touch gone")
        .remove("/home/user/gone")
        .set_user("user")
        .set_workdir("/home/user/d")
        .set_start_cmd("sleep 1000", wait_for_file("/home/user/h"))
    )
    assert '"steps"' in AsyncTemplate.to_json(template)
    info = await AsyncTemplate.build(template, tag)
    sbx = await amake(tag)
    assert (await sbx.commands.run("pwd; echo $WORD; cat ../link; ls ..")).stdout == "/home/user/d\nw\ncopied" + "d\nh\nlink\n"
    assert [p.args[-1] for p in await sbx.commands.list()] == ["sleep 1000"]
    other = AsyncTemplate().from_dockerfile("FROM e2bdev/base\nRUN true\n").set_ready_cmd("true")
    assert "RUN true" in AsyncTemplate.to_dockerfile(AsyncTemplate().from_image("debian").run_cmd("true"))
    await AsyncTemplate.build(other, tag)
    await AsyncSandbox.delete_snapshot(info.template_id)
