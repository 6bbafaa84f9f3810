"""Images from a registry that the test started, by name and with its password."""

import os
from datetime import timedelta

import httpx
import pytest

from code_interpreter import CodeInterpreterSync
from conftest import LIFETIME, NEWEST, err, out
from opensandbox import SandboxSync
from opensandbox.exceptions import SandboxException
from opensandbox.models.sandboxes import SandboxImageAuth, SandboxImageSpec

proves = pytest.mark.proves
REGISTRY = os.environ["OPENSANDBOX_SUITE_REGISTRY"]  # the open one, and below /private the one with a password
USER, PASSWORD = os.environ["OPENSANDBOX_SUITE_REGISTRY_USER"], os.environ["OPENSANDBOX_SUITE_REGISTRY_PASSWORD"]


def downloads(repository):
    """How many blobs of a repository the registry has given out."""
    return int(httpx.get(f"http://{REGISTRY}/asked?blobs={repository}").text)


@proves("Sandbox.create (image)")
def test_S3_3_an_image_is_pulled_once(make):
    name = f"{REGISTRY}/once:1"
    assert out(make(name).commands.run("cat /etc/made-by")) == ["the test"]
    before = downloads("once")
    assert out(make(name).commands.run("cat /etc/made-by")) == ["the test"]
    assert downloads("once") == before > 0


@proves("Sandbox.create (image)")
def test_the_images_environment_directory_and_user_are_honoured(make):
    sbx = make(f"{REGISTRY}/configured:1")
    assert out(sbx.commands.run('id -u; pwd; echo "$FROM_IMAGE"; echo "$HOME"')) == ["1234", "/srv/place", "yes", "/home/app"]
    mine = make(f"{REGISTRY}/configured:1", env={"FROM_IMAGE": "no"})
    assert out(mine.commands.run('echo "$FROM_IMAGE"')) == ["no"]
    assert sbx.commands.run("touch /srv/place/file && touch /etc/passwd").exit_code != 0
    sbx.files.write_file("/srv/place/by-upload", "x")
    assert sbx.files.get_file_info(["/srv/place/by-upload"])["/srv/place/by-upload"].owner == "app"


@proves("Sandbox.create (image)")
def test_layers_whiteouts_and_links_are_as_they_were_built(make):
    sbx = make(f"{REGISTRY}/layers:1")
    assert out(sbx.commands.run("cd /data && ls; cat link; ls opaque")) == ["hard", "kept", "link", "opaque", "kept", "new"]
    assert out(sbx.commands.run("test /data/kept -ef /data/hard && echo same")) == ["same"]


@proves("Sandbox.create (image)")
def test_files_are_written_above_shared_layers(make):
    a, b = make(f"{REGISTRY}/busybox:1"), make(f"{REGISTRY}/busybox:1")
    assert a.commands.run("echo changed > /etc/made-by; rm /etc/passwd").exit_code == 0
    assert out(b.commands.run("cat /etc/made-by; ls /etc/passwd")) == ["the test", "/etc/passwd"]


@proves("Sandbox.create (image with auth)")
def test_a_private_image_wants_the_password(make, wire, tag):
    name = f"{REGISTRY}/private/{tag}:1"
    for auth in (None, SandboxImageAuth(username=USER, password="wrong-" + tag)):
        with pytest.raises(SandboxException) as refused:
            SandboxSync.create(SandboxImageSpec(name, auth=auth), timeout=LIFETIME, metadata={"run": tag})
        assert name in str(refused.value) or not NEWEST
        assert "wrong-" not in str(refused.value)
    assert wire.made(tag) == 0
    sbx = make(SandboxImageSpec(name, auth=SandboxImageAuth(username=USER, password=PASSWORD)))
    assert out(sbx.commands.run("echo in")) == ["in"]
    assert PASSWORD not in wire.api("GET", f"/sandboxes/{sbx.id}").text


@proves("Sandbox.create (image with auth)")
def test_another_tenant_has_to_know_the_password_too(make, config, tag):
    name = f"{REGISTRY}/private/{tag}:1"
    make(SandboxImageSpec(name, auth=SandboxImageAuth(username=USER, password=PASSWORD)))
    with pytest.raises(SandboxException):
        SandboxSync.create(SandboxImageSpec(name), connection_config=config(api_key=os.environ["OPENSANDBOX_SUITE_FOREIGN_KEY"]), timeout=LIFETIME)


@proves("Sandbox.create (image)")
@pytest.mark.parametrize(
    "image", ["{r}/none:1", "{r}/busybox:none", "127.0.0.1:1/busybox:1", "{r}/broken:1", "{r}/foreign:1", "{r}/hostile:1", "UPPER/Case:1", "a b", "{r}/busybox@sha256:" + "0" * 64],
    ids=["no repository", "no tag", "unreachable", "a wrong layer", "another architecture", "a hostile layer", "capitals", "a space", "no digest"],
)
def test_S3_12_an_image_that_cannot_be_had(wire, image, tag):
    name = image.format(r=REGISTRY)
    with pytest.raises(SandboxException) as refused:
        SandboxSync.create(name, timeout=LIFETIME, metadata={"run": tag})
    api = refused.value
    assert api.status_code in (400, 403, 500), api  # what the SDK reads a code and a sentence from
    assert api.error.code and len(api.error.message) > 15
    assert "goroutine" not in api.error.message and "cove-e2e/" not in api.error.message and "templates/" not in api.error.message
    assert wire.made(tag) == 0


@proves("Sandbox.create (image)", "codes.run")
def test_code_runs_wherever_there_is_python3(make):
    sbx = make(f"{REGISTRY}/python:1")
    interpreter = CodeInterpreterSync.create(sbx) if not NEWEST else CodeInterpreterSync.create(sbx, skip_health_check=True)
    execution = interpreter.codes.run("import sys, os\nprint(os.path.exists('/etc/made-by'))\nsum(range(10))")
    assert execution.error is None, execution.error
    assert execution.result[0].text == "45"
    assert "True" in "".join(m.text for m in execution.logs.stdout)


@proves("Sandbox.create (image)", "codes.run")
def test_code_where_there_is_no_python_says_so(make):
    sbx = make(f"{REGISTRY}/busybox:1")
    interpreter = CodeInterpreterSync.create(sbx) if not NEWEST else CodeInterpreterSync.create(sbx, skip_health_check=True)
    try:
        execution = interpreter.codes.run("1 + 1")
    except SandboxException as refused:
        assert "python3" in str(refused)
    else:
        assert "python3" in execution.error.value


@proves("Sandbox.create (image)")
def test_an_image_of_one_file_runs_it(make):
    sbx = make(f"{REGISTRY}/scratch:1")
    assert sbx.is_healthy()
    if NEWEST:
        assert out(sbx.commands.run(["/busybox", "echo", "from scratch"])) == ["from scratch"]
        assert out(sbx.commands.run(["/busybox", "id", "-u"])) == ["0"]
    shell = None
    try:
        shell = sbx.commands.run("echo hello")
    except SandboxException as refused:
        assert "sh" in str(refused) or not NEWEST  # June's tells the status only
    else:
        assert shell.error is not None, (out(shell), err(shell))
    sbx.files.write_file("/data/new.txt", "written")
    assert sbx.files.read_file("/data/new.txt") == "written"


@proves("Sandbox.create (image)")
def test_an_image_of_many_layers(make):
    sbx = make(f"{REGISTRY}/deep:1", connection_config=None, ready_timeout=timedelta(minutes=10))
    assert out(sbx.commands.run("ls /layers | wc -l")) == ["100"]


@proves("Sandbox.create (image)", "Sandbox.create_snapshot")
def test_a_snapshot_of_an_image(make, manager, tag):
    from conftest import eventually

    sbx = make(f"{REGISTRY}/configured:1")
    sbx.commands.run(f"echo {tag} > /srv/place/kept")
    shot = sbx.create_snapshot()
    eventually(lambda: manager.get_snapshot(shot.id).status.state == "Ready")
    born = make(snapshot_id=shot.id)
    assert out(born.commands.run('cat kept; id -u; echo "$FROM_IMAGE"')) == [tag, "1234", "yes"]
    born.kill()
    manager.delete_snapshot(shot.id)
