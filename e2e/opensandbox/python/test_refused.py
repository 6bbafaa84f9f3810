"""What a Pod cannot do is told by the SDK's own exception, or by the state that it asks for, with a sentence, and the sandbox goes on. Collected where
sandboxes are Pods."""

import pytest

from conftest import out
from opensandbox import SandboxSync
from opensandbox.exceptions import SandboxApiException
from opensandbox.models.execd import RunCommandOpts
from opensandbox.models.sandboxes import PVC, Volume


def test_a_pause_is_refused_and_the_sandbox_goes_on(make, manager):
    sbx = make()
    for pause in (sbx.pause, lambda: manager.pause_sandbox(sbx.id)):
        with pytest.raises(SandboxApiException, match="driver cannot pause sandboxes") as refused:
            pause()
        assert refused.value.status_code == 501
    assert sbx.get_info().status.state == "Running"
    assert out(sbx.commands.run("echo alive")) == ["alive"]


def test_a_resume_of_what_runs_is_a_conflict(make):
    sbx = make()
    with pytest.raises(SandboxApiException) as refused:
        SandboxSync.resume(sbx.id)
    assert refused.value.status_code == 409
    assert out(sbx.commands.run("echo alive")) == ["alive"]


def test_a_snapshot_fails_says_why_and_the_sandbox_goes_on(make, manager):
    sbx = make()
    for snapshot in (sbx.create_snapshot, lambda: manager.create_snapshot(sbx.id)):
        shot = snapshot()
        assert shot.status.state == "Failed"
        assert "driver cannot make templates of sandboxes" in shot.status.message
        with pytest.raises(SandboxApiException):
            make(snapshot_id=shot.id)
        manager.delete_snapshot(shot.id)
    assert out(sbx.commands.run("echo alive")) == ["alive"]


def test_a_volume_is_refused_and_nothing_is_made(make, tag, wire):
    with pytest.raises(SandboxApiException) as refused:
        make(metadata={"run": tag}, volumes=[Volume(name="data", pvc=PVC(claimName=tag), mountPath="/data")])
    assert (refused.value.status_code, refused.value.error.code) == (400, "VOLUME::UNSUPPORTED_BACKEND")
    assert "driver has neither volumes nor host paths" in refused.value.error.message
    assert wire.made(tag) == 0


def test_an_image_that_no_template_stands_for_is_refused_and_nothing_is_made(make, tag, wire):
    with pytest.raises(SandboxApiException, match="start from its templates"):
        make(f"registry.example.com/{tag}:latest", metadata={"run": tag})
    assert wire.made(tag) == 0


def test_another_user_is_refused_and_the_sandbox_goes_on(make):
    sbx = make()
    with pytest.raises(SandboxApiException, match="this sandbox cannot become the user") as refused:
        sbx.commands.run("id -u", opts=RunCommandOpts(uid=1234, gid=2345))
    assert refused.value.status_code == 400
    assert out(sbx.commands.run("id -u")) == ["1000"]
