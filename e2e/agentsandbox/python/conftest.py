"""Fixtures of the suite. One set of tests drives three generations of the client, which differ in what a sandbox is made from."""

import importlib.metadata
import os
import pathlib
import re
import uuid

import pytest
from suite import aeventually, eventually, note  # noqa: F401 tests take the first two from here

import k8s_agent_sandbox
from k8s_agent_sandbox import SandboxClient
from k8s_agent_sandbox.models import SandboxDirectConnectionConfig, SandboxLocalTunnelConnectionConfig

VERSION = tuple(int(part) for part in importlib.metadata.version("k8s-agent-sandbox").split(".")[:2])
POOL = "python-3.12"  # a name that the server maps to a template of its own
NAMESPACE = "agent-sandboxes"
WAY = os.environ.get("AGENT_SANDBOX_WAY", "direct")
# Which client this run is about, by the folder of its lock file. Without a word it is the one that the path leads to.
CLIENT = os.environ.get("AGENT_SANDBOX_CLIENT") or "".join(re.findall(r"agentsandbox-(v\d+)-", os.environ.get("PYTHONPATH", ""))) or "newest"


def pytest_configure():
    """An older client is laid over the newest by a path: where that fails, all tests would run with the newest and pass."""
    lock = pathlib.Path(__file__).parent.parent / CLIENT / "requirements.lock"
    wanted = re.search(r"^k8s-agent-sandbox(?:\[[^]]*\])?==(\S+)", lock.read_text(), re.MULTILINE)[1]
    found = importlib.metadata.distribution("k8s-agent-sandbox")
    loaded = pathlib.Path(k8s_agent_sandbox.__file__).parent
    if found.version != wanted or loaded != pathlib.Path(found.locate_file("k8s_agent_sandbox")):
        raise pytest.UsageError(f"this run is about the client {wanted} of {CLIENT}, and {loaded} is loaded, of {found.version}")


def pytest_collection_modifyitems(items):
    for item in items:
        for mark in item.iter_markers("since"):
            if VERSION < mark.args:
                item.add_marker(pytest.mark.skip(reason="this client cannot do it"))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    reports = os.environ.get("AGENTSANDBOX_SUITE_REPORTS")
    note(reports and f"{reports}/agentsandbox.jsonl", f"python-{VERSION[0]}.{VERSION[1]}-{WAY}", item, call, (yield).get_result())


def config():
    """How the suite's clients reach sandboxes."""
    if WAY == "tunnel":
        return SandboxLocalTunnelConnectionConfig()
    return SandboxDirectConnectionConfig(api_url=os.environ["AGENT_SANDBOX_ROUTER_URL"])


def new(client, pool=POOL, namespace=NAMESPACE, **options):
    """Makes a sandbox as the client's version does it."""
    if VERSION < (0, 5):
        return client.create_sandbox(template=pool, namespace=namespace, **options)
    return client.create_sandbox(warmpool=pool, namespace=namespace, **options)


@pytest.fixture(scope="session")
def way():
    return WAY


@pytest.fixture
def client():
    """A client of one test; what it made ends with it."""
    c = SandboxClient(connection_config=config())
    yield c
    c.delete_all()


@pytest.fixture(scope="module")
def sandbox():
    """A sandbox that the tests of a module share: they leave it as they found it."""
    c = SandboxClient(connection_config=config())
    yield new(c)
    c.delete_all()


@pytest.fixture
def folder(sandbox):
    """A directory of the shared sandbox for one test."""
    path = f"/tmp/t{uuid.uuid4().hex[:12]}"
    assert sandbox.commands.run(f"mkdir {path}").exit_code == 0
    yield path
    sandbox.commands.run(f"rm -rf {path}")
