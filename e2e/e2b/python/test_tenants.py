"""What is one tenant's is not there for another, whatever is asked."""

import os

import pytest

from e2b import NotFoundException, Sandbox, SandboxException, SandboxNotFoundException, SandboxQuery, Template


@pytest.fixture(scope="module")
def foreign():
    key = os.environ.get("E2B_SUITE_FOREIGN_KEY")
    if not key:
        pytest.skip("E2B_SUITE_FOREIGN_KEY is not set")
    return {"api_key": key}


@pytest.mark.proves("errors: foreign tenant")
def test_a_foreign_sandbox_is_not_found(sandbox, foreign):
    sandbox_id = sandbox.sandbox_id
    for call in (
        lambda: Sandbox.get_info(sandbox_id, **foreign),
        lambda: Sandbox.connect(sandbox_id, **foreign),
        lambda: Sandbox.set_timeout(sandbox_id, 1, **foreign),
        lambda: Sandbox.pause(sandbox_id, **foreign),
        lambda: Sandbox.fork(sandbox_id, **foreign),
        lambda: Sandbox.create_snapshot(sandbox_id, **foreign),
        lambda: Sandbox.get_metrics(sandbox_id, **foreign),
        lambda: Sandbox.update_network(sandbox_id, {}, **foreign),
    ):
        with pytest.raises((SandboxNotFoundException, NotFoundException)):
            call()
    assert Sandbox.kill(sandbox_id, **foreign) is False
    assert sandbox.is_running()


@pytest.mark.proves("errors: foreign tenant")
def test_foreign_sandboxes_are_not_listed(make, foreign, tag):
    make(metadata={"id": tag})
    assert Sandbox.list(query=SandboxQuery(metadata={"id": tag}), **foreign).next_items() == []


@pytest.mark.proves("errors: foreign tenant")
def test_foreign_templates_and_snapshots_are_not_there(make, foreign, tag):
    info = Template.build(Template().from_template("base").run_cmd("true"), tag)
    shot = make().create_snapshot()
    for name in (tag, info.template_id, shot.snapshot_id):
        with pytest.raises(SandboxException, match="40[34]"):
            Sandbox.create(name, **foreign)
        assert Sandbox.delete_snapshot(name, **foreign) is False
    assert Sandbox.list_snapshots(**foreign).next_items() == []
    assert Sandbox.delete_snapshot(shot.snapshot_id) is True
    assert Sandbox.delete_snapshot(info.template_id) is True


@pytest.mark.proves("errors: foreign tenant")
def test_a_token_opens_one_sandbox_alone(make, wire):
    mine, other = make(), make()
    token = {"X-Access-Token": mine._envd_access_token}
    stat = {"path": "/"}
    assert wire.data("POST", mine.sandbox_id, 49983, "/filesystem.Filesystem/Stat", token, json=stat).status_code == 200
    assert wire.data("POST", other.sandbox_id, 49983, "/filesystem.Filesystem/Stat", token, json=stat).status_code == 401
    key = {"X-API-Key": wire.key}
    assert wire.data("POST", mine.sandbox_id, 49983, "/filesystem.Filesystem/Stat", key, json=stat).status_code == 401
