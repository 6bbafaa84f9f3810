"""What Cove leaves out answers with a sentence and never with silence."""

import pytest

from e2b import Sandbox, SandboxException, Secret, Volume


@pytest.mark.proves("errors: volumes")
def test_volumes_are_refused_clearly(tag):
    with pytest.raises(Exception, match="(?i)volume"):
        Volume.create(tag)
    with pytest.raises(Exception, match="(?i)volume"):
        Volume.list()


@pytest.mark.proves("errors: secrets")
def test_secrets_are_refused_clearly(tag):
    with pytest.raises(Exception, match="(?i)secret"):
        Secret.create(tag, "value")


@pytest.mark.proves("errors: the MCP gateway")
def test_the_mcp_gateway_is_refused_clearly():
    with pytest.raises(SandboxException, match="(?i)mcp"):
        Sandbox.create(mcp={"github": {}}, timeout=30)


@pytest.mark.proves("Sandbox.get_mcp_token")
def test_without_a_gateway_there_is_no_token(sandbox):
    with pytest.raises(Exception, match="does not exist"):
        sandbox.get_mcp_token()
