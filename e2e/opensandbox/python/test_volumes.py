"""Host paths from the server's allow-list, and named volumes."""

import os

import pytest

from conftest import eventually, out
from opensandbox.exceptions import SandboxApiException
from opensandbox.models.sandboxes import PVC, Host, Volume

proves = pytest.mark.proves

# What the server's configuration allows: one directory to read, one to write too.
READ, WRITE = os.environ["OPENSANDBOX_SUITE_HOST_READ"], os.environ["OPENSANDBOX_SUITE_HOST_WRITE"]


def host(path, at="/mnt/host", name="h", **kw):
    return Volume(name=name, host=Host(path=path), mountPath=at, **kw)


def named(claim, at="/mnt/vol", name="v", sub=None, **kw):
    options = {k: kw.pop(k) for k in ("createIfNotExists", "deleteOnSandboxTermination") if k in kw}
    return Volume(name=name, pvc=PVC(claimName=claim, **options), mountPath=at, subPath=sub, **kw)


@proves("Sandbox.create (host volume)")
def test_a_host_path_is_read(make):
    sbx = make(volumes=[host(READ, readOnly=True)])
    assert sbx.files.read_file("/mnt/host/greeting.txt") == "hello from the host\n"
    assert sbx.commands.run("touch /mnt/host/new").exit_code != 0
    assert not os.path.exists(f"{READ}/new")
    inner = make(volumes=[host(READ, readOnly=True, subPath="inner")])
    assert out(inner.commands.run("ls /mnt/host")) == ["deep.txt"]


@proves("Sandbox.create (host volume)")
def test_a_host_path_is_written_where_the_config_says_so(make, tag):
    sbx = make(volumes=[host(WRITE)])
    assert sbx.commands.run(f"echo written > /mnt/host/{tag}").exit_code == 0
    with open(f"{WRITE}/{tag}", encoding="utf-8") as f:
        assert f.read() == "written\n"
    kept = os.stat(f"{WRITE}/{tag}")
    assert kept.st_uid == os.stat(WRITE).st_uid
    sbx.commands.run(f"chmod 4755 /mnt/host/{tag}; ln -s /etc/passwd /mnt/host/{tag}.link")
    with pytest.raises(SandboxApiException):
        make(volumes=[host(f"{WRITE}/{tag}.link")])


@proves("Sandbox.create (host volume)")
@pytest.mark.parametrize(
    ("volume", "code"),
    [
        (lambda: host("/etc", readOnly=True), "VOLUME::HOST_PATH_NOT_ALLOWED"),
        (lambda: host("/", readOnly=True), "VOLUME::HOST_PATH_NOT_ALLOWED"),
        (lambda: host(READ), "VOLUME::HOST_PATH_NOT_ALLOWED"),
        (lambda: host(READ + "/../../etc", readOnly=True), "VOLUME::"),
        (lambda: host(READ + "x", readOnly=True), "VOLUME::"),
        (lambda: host(READ + "/none", readOnly=True), "VOLUME::HOST_PATH_NOT_FOUND"),
        (lambda: host(READ, readOnly=True, subPath="../x"), "VOLUME::INVALID_SUB_PATH"),
        (lambda: host(READ, readOnly=True, subPath="out"), "VOLUME::"),  # a link that leads out
        (lambda: host(READ, "/proc/x", readOnly=True), "VOLUME::INVALID_MOUNT_PATH"),
        (lambda: host(READ, "/", readOnly=True), "VOLUME::INVALID_MOUNT_PATH"),
        (lambda: host(READ, "/mnt/../proc", readOnly=True), "VOLUME::INVALID_MOUNT_PATH"),
        (lambda: host(READ, name="Not A Label", readOnly=True), "VOLUME::INVALID_NAME"),
        (lambda: named("../../etc"), "VOLUME::"),
        (lambda: named("none-such", createIfNotExists=False), "VOLUME::PVC_NOT_FOUND"),
    ],
)
def test_a_volume_that_cannot_be_had(make, volume, code):
    with pytest.raises(SandboxApiException) as refused:
        make(volumes=[volume()])
    assert refused.value.status_code == 400, refused.value.error
    assert refused.value.error.code.startswith(code), refused.value.error.code
    assert len(refused.value.error.message) > 10


@proves("Sandbox.create (host volume)")
def test_names_are_used_once(make):
    with pytest.raises(SandboxApiException) as refused:
        make(volumes=[host(READ, readOnly=True), host(READ, "/mnt/two", readOnly=True)])
    assert refused.value.error.code == "VOLUME::DUPLICATE_NAME"


@proves("Sandbox.create (named volume)")
def test_a_named_volume_outlives_its_sandbox(make, tag):
    first = make(volumes=[named(tag)])
    assert first.commands.run("mkdir /mnt/vol/sub && echo kept > /mnt/vol/sub/file").exit_code == 0
    second = make(volumes=[named(tag, createIfNotExists=False)])
    assert out(second.commands.run("cat /mnt/vol/sub/file")) == ["kept"]
    first.kill()
    sub = make(volumes=[named(tag, sub="sub", readOnly=True), named(tag, "/mnt/all", name="all")])
    assert out(sub.commands.run("ls /mnt/vol")) == ["file"]
    assert sub.commands.run("touch /mnt/vol/x").exit_code != 0
    assert sub.commands.run("touch /mnt/all/sub/y").exit_code == 0
    assert out(sub.commands.run("ls /mnt/vol")) == ["file", "y"]


@proves("Sandbox.create (named volume)")
def test_a_volume_ends_with_its_sandbox_when_asked(make, tag):
    make(volumes=[named(tag, deleteOnSandboxTermination=True)]).kill()

    def gone():
        try:
            make(volumes=[named(tag, createIfNotExists=False)])
        except SandboxApiException as refused:
            return refused.error.code == "VOLUME::PVC_NOT_FOUND"
        return False

    eventually(gone)


@proves("Sandbox.create (named volume)")
def test_another_tenants_volume_is_another(make, tag, config):
    make(volumes=[named(tag)]).commands.run("echo mine > /mnt/vol/f")
    theirs = make(volumes=[named(tag)], connection_config=config(api_key=os.environ["OPENSANDBOX_SUITE_FOREIGN_KEY"]))
    assert out(theirs.commands.run("ls /mnt/vol | grep -v lost+found")) == []


@proves("Sandbox.create (ossfs volume)")
def test_object_storage_is_refused_with_a_sentence(make):
    from opensandbox.models.sandboxes import OSSFS

    volume = Volume(name="o", ossfs=OSSFS(bucket="bucket", endpoint="oss.example.com", accessKeyId="id", accessKeySecret="hunter2"), mountPath="/mnt/o")
    with pytest.raises(SandboxApiException) as refused:
        make(volumes=[volume])
    assert refused.value.error.code == "VOLUME::UNSUPPORTED_BACKEND"
    assert "hunter2" not in str(refused.value)
