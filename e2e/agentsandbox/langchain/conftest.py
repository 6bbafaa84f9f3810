"""Sandboxes of the official client behind the official adapter."""

import os

import pytest
from k8s_agent_sandbox import SandboxClient
from k8s_agent_sandbox.models import SandboxDirectConnectionConfig, SandboxLocalTunnelConnectionConfig
from langchain_kubernetes_agent_sandbox import KubernetesAgentSandbox
from suite import note

NAMESPACE = "agent-sandboxes"


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
