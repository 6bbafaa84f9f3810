"""What a Pod cannot do is refused by the SDK's own exception, with a sentence, and the sandbox goes on. Collected where sandboxes are Pods."""

import pytest

from e2b import BuildException, Sandbox, SandboxException, SandboxQuery, Template


def test_a_pause_is_refused_and_the_sandbox_goes_on(make):
    sbx = make()
    for pause in (sbx.pause, lambda: sbx.pause(mode="filesystem"), lambda: Sandbox.pause(sbx.sandbox_id)):
        with pytest.raises(SandboxException, match="driver cannot pause sandboxes") as refused:
            pause()
        assert refused.value.status_code == 501
    assert sbx.commands.run("echo alive").stdout == "alive\n"


@pytest.mark.parametrize("lifecycle", [{"on_timeout": "pause"}, {"on_timeout": "pause", "auto_resume": True}], ids=["pause", "pause and resume"])
def test_a_life_that_would_end_in_a_pause_is_refused_before_it_begins(tag, lifecycle):
    with pytest.raises(SandboxException, match="driver cannot pause sandboxes"):
        Sandbox.create(lifecycle=lifecycle, metadata={"id": tag}, timeout=30)
    assert Sandbox.list(query=SandboxQuery(metadata={"id": tag})).next_items() == []


def test_a_snapshot_is_refused_and_the_sandbox_goes_on(make):
    sbx = make()
    with pytest.raises(SandboxException, match="driver cannot make templates of sandboxes") as refused:
        sbx.create_snapshot()
    assert refused.value.status_code == 501
    assert sbx.commands.run("echo alive").stdout == "alive\n"
    assert sbx.list_snapshots().next_items() == []


def test_a_fork_is_refused_and_nothing_is_made(make, tag):
    sbx = make(metadata={"id": tag})
    with pytest.raises(SandboxException, match="driver cannot fork sandboxes"):
        sbx.fork(count=2)
    assert [s.sandbox_id for s in Sandbox.list(query=SandboxQuery(metadata={"id": tag})).next_items()] == [sbx.sandbox_id]


def test_a_template_of_ones_own_is_refused(tag):
    with pytest.raises(BuildException, match="driver cannot make templates"):
        Template.build(Template().from_base_image().set_envs({"A": "b"}), tag)
    with pytest.raises(SandboxException, match="404"):
        Sandbox.create(tag)


def test_another_user_is_refused_and_the_sandbox_goes_on(make):
    sbx = make()
    for call in (lambda: sbx.commands.run("id", user="root"), lambda: sbx.files.write("/tmp/roots", "x", user="root")):
        with pytest.raises(SandboxException, match='this sandbox cannot become the user "root"'):
            call()
    assert sbx.commands.run("id -u; test -e /tmp/roots || echo nothing").stdout == "1000\nnothing\n"
