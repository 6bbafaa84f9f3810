"""Making sandboxes, finding them again, ending them."""

import os
import subprocess
import time
import uuid

import pytest
from conftest import NAMESPACE, POOL, VERSION, config, eventually, new

from k8s_agent_sandbox import SandboxClient, exceptions


def text(result):
    assert result.exit_code == 0, result
    return result.stdout


def test_S1_4_a_sandbox_from_a_template_and_a_namespace(client):
    sandbox = new(client)
    assert text(sandbox.commands.run("echo 'Hello from SDK'")) == "Hello from SDK\n"
    assert sandbox.namespace == NAMESPACE
    assert sandbox.is_active
    assert client.list_active_sandboxes() == [(NAMESPACE, sandbox.claim_name)]
    assert sandbox.claim_name in client.list_all_sandboxes(namespace=NAMESPACE)


def test_S1_5_the_suite_connects_as_it_was_told(client, way):
    sandbox = new(client)
    assert text(sandbox.commands.run("id -un")) == "user\n"
    children = subprocess.run(["ps", "-o", "args=", "--ppid", str(os.getpid())], capture_output=True, text=True).stdout
    assert ("port-forward svc/sandbox-router-svc" in children) == (way == "tunnel"), children


def test_the_sandbox_is_named_like_its_claim(client):
    sandbox = new(client)
    assert sandbox.sandbox_id == sandbox.claim_name


@pytest.mark.since(0, 5)
def test_status_and_names(client):
    sandbox = new(client)
    state, message = sandbox.status()
    assert state == "SandboxReady", message
    assert sandbox.get_pod_name() == sandbox.sandbox_id
    assert sandbox.get_pod_ip()


def test_an_environment_of_its_own(client):
    one, two = new(client), new(client)
    one.commands.run("echo one > /tmp/mine")
    assert two.commands.run("cat /tmp/mine").exit_code != 0


def test_another_client_attaches_and_the_first_may_leave(client):
    sandbox = new(client)
    sandbox.commands.run("echo kept > kept.txt")
    other = SandboxClient(connection_config=config())
    again = other.get_sandbox(sandbox.claim_name, namespace=NAMESPACE)
    assert text(again.commands.run("cat kept.txt")) == "kept\n"
    again.close_connection()
    assert not again.is_active
    third = other.get_sandbox(sandbox.claim_name, namespace=NAMESPACE)
    assert text(third.commands.run("cat kept.txt")) == "kept\n"
    third.close_connection()


def test_a_terminated_sandbox_is_gone(client):
    sandbox = new(client)
    name = sandbox.claim_name
    sandbox.terminate()
    assert not sandbox.is_active
    eventually(lambda: name not in client.list_all_sandboxes(namespace=NAMESPACE))
    with pytest.raises(RuntimeError, match="not found"):
        client.get_sandbox(name, namespace=NAMESPACE, resolve_timeout=2)


def test_delete_sandbox_by_name_and_delete_all(client):
    names = [new(client).claim_name for _ in range(3)]
    client.delete_sandbox(names[0], namespace=NAMESPACE)
    eventually(lambda: names[0] not in client.list_all_sandboxes(namespace=NAMESPACE))
    assert names[1] in client.list_all_sandboxes(namespace=NAMESPACE)
    client.delete_all()
    eventually(lambda: not set(names) & set(client.list_all_sandboxes(namespace=NAMESPACE)))
    assert client.list_active_sandboxes() == []


def test_requests_to_an_ended_sandbox_fail_at_once(client):
    sandbox = new(client)
    assert sandbox.commands.run("true").exit_code == 0
    SandboxClient(connection_config=config()).delete_sandbox(sandbox.claim_name, namespace=NAMESPACE)
    eventually(lambda: sandbox.claim_name not in client.list_all_sandboxes(namespace=NAMESPACE))
    begun = time.monotonic()
    with pytest.raises(Exception) as failed:
        sandbox.commands.run("true")
    assert time.monotonic() - begun < 100, "it was tried again and again"
    assert getattr(failed.value, "status_code", 404) == 404


@pytest.mark.since(0, 4)
def test_labels(client):
    run = f"r{uuid.uuid4().hex[:8]}"
    sandbox = new(client, labels={"suite/run": run})
    plain = new(client)
    if VERSION < (0, 5):
        names = client.list_all_sandboxes(namespace=NAMESPACE)
        assert {sandbox.claim_name, plain.claim_name} <= set(names)
        return
    assert client.list_all_sandboxes(namespace=NAMESPACE, label_selector=f"suite/run={run}") == [sandbox.claim_name]
    assert sandbox.claim_name not in client.list_all_sandboxes(namespace=NAMESPACE, label_selector=f"suite/run!={run}")


def test_shutdown_after_seconds(client):
    sandbox = new(client, shutdown_after_seconds=30)
    assert sandbox.commands.run("true").exit_code == 0
    eventually(lambda: sandbox.claim_name not in client.list_all_sandboxes(namespace=NAMESPACE))


def test_a_pool_that_there_is_not_fails_at_once(client):
    begun = time.monotonic()
    wrong = getattr(exceptions, "SandboxTemplateNotFoundError", RuntimeError)
    with pytest.raises((wrong, getattr(exceptions, "SandboxWarmPoolNotFoundError", wrong)), match="no-such-pool"):
        new(client, "no-such-pool")
    assert time.monotonic() - begun < 100
    assert client.list_active_sandboxes() == []


def test_namespaces_are_apart(client):
    sandbox = new(client, namespace="another-namespace")
    assert text(sandbox.commands.run("echo there")) == "there\n"
    assert sandbox.claim_name not in client.list_all_sandboxes(namespace=NAMESPACE)
    assert sandbox.claim_name in client.list_all_sandboxes(namespace="another-namespace")


@pytest.mark.since(0, 5)
def test_which_pool_a_claim_is_of(client):
    sandbox = new(client)
    assert client.get_sandbox_claim_warmpool_name(sandbox.claim_name, NAMESPACE) == POOL


@pytest.mark.since(1, 0)
def test_environment_variables(client):
    sandbox = new(client, env={"GREETING": "hello $HOME"})
    assert text(sandbox.commands.run('printf %s "$GREETING"')) == "hello $HOME"


@pytest.mark.since(1, 0)
def test_a_name_of_ones_own_and_adoption(client):
    name = f"mine-{uuid.uuid4().hex[:8]}"
    first = new(client, claim_name=name)
    first.commands.run("echo kept > kept")
    other = SandboxClient(connection_config=config())
    adopted = new(other, claim_name=name, adopt_existing=True)
    assert text(adopted.commands.run("cat kept")) == "kept\n"
    with pytest.raises(Exception, match="(?i)conflict|exists"):
        new(other, claim_name=name)
    adopted.close_connection()
    client.delete_sandbox(name, namespace=NAMESPACE)


@pytest.mark.since(0, 5)
def test_metadata_of_the_pod(client):
    sandbox = new(client, pod_labels={"sandbox.users.io/team": "blue"}, pod_annotations={"sandbox.users.io/note": "hello"})
    assert sandbox.status()[0] == "SandboxReady"
