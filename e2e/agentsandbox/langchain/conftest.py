"""Sandboxes of the official client behind the official adapter."""

import importlib.metadata
import os
import pathlib
import re

import k8s_agent_sandbox
import pytest
from k8s_agent_sandbox import SandboxClient
from k8s_agent_sandbox.models import SandboxDirectConnectionConfig, SandboxLocalTunnelConnectionConfig
from langchain_kubernetes_agent_sandbox import KubernetesAgentSandbox
from suite import note

NAMESPACE = "agent-sandboxes"
# Which client this run is about, by the folder of its lock file. Without a word it is the one that the path leads to.
CLIENT = os.environ.get("AGENT_SANDBOX_CLIENT") or "".join(re.findall(r"agentsandbox-(v\d+)-", os.environ.get("PYTHONPATH", ""))) or "langchain"


def pytest_configure():
    """An older client is laid over the one that pip finds by a path: where that fails, all tests would run with the newer one and pass."""
    lock = pathlib.Path(__file__).parent.parent / CLIENT / "requirements.lock"
    wanted = re.search(r"^k8s-agent-sandbox(?:\[[^]]*\])?==(\S+)", lock.read_text(), re.MULTILINE)[1]
    found = importlib.metadata.distribution("k8s-agent-sandbox")
    loaded = pathlib.Path(k8s_agent_sandbox.__file__).parent
    if found.version != wanted or loaded != pathlib.Path(found.locate_file("k8s_agent_sandbox")):
        raise pytest.UsageError(f"this run is about the client {wanted} of {CLIENT}, and {loaded} is loaded, of {found.version}")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    reports = os.environ.get("AGENTSANDBOX_SUITE_REPORTS")
    note(reports and f"{reports}/agentsandbox-langchain.jsonl", "langchain", item, call, (yield).get_result())


def client():
    if os.environ.get("AGENT_SANDBOX_WAY") == "tunnel":
        return SandboxClient(connection_config=SandboxLocalTunnelConnectionConfig())
    return SandboxClient(connection_config=SandboxDirectConnectionConfig(api_url=os.environ["AGENT_SANDBOX_ROUTER_URL"]))


def raw():
    """A sandbox as either generation makes it: its first argument is a template or a warm pool."""
    return client().create_sandbox("python-3.12", namespace=NAMESPACE)


@pytest.fixture(scope="module")
def backend():
    made = KubernetesAgentSandbox(sandbox=raw())
    yield made
    made.sandbox.terminate()
