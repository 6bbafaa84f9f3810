"""pydantic-ai-harness: its E2B backend under the conformance suite that pydantic-ai publishes for backends."""

import sys

import e2b
import pytest
from pydantic_ai.workspaces.conformance import WorkspaceBackendSuite
from pydantic_ai_harness.e2b_sandbox import E2BSandboxBackend

from steps import Steps

step = Steps("pydantic-ai-harness")


@pytest.fixture
def anyio_backend():
    return "asyncio"


async def destroy(backend):
    await e2b.AsyncSandbox.kill(backend.ref.id)


class TestBackend(WorkspaceBackendSuite):
    @pytest.fixture
    async def backend(self):
        backend = E2BSandboxBackend(sandbox_timeout=300)
        yield backend
        if backend.ref is not None:
            await destroy(backend)

    @pytest.fixture
    def fresh_backend(self):
        return lambda: E2BSandboxBackend(sandbox_timeout=300)

    @pytest.fixture
    def filesystem_honors_shell_permissions(self):
        return False  # envd's file routes are root's, in Cove as in E2B

    @pytest.fixture
    def attach_backend(self):
        return lambda ref: E2BSandboxBackend(ref=ref)

    @pytest.fixture
    def destroy_environment(self):
        return destroy


class Report:
    """Makes a step of each test that ran."""

    def pytest_runtest_logreport(self, report):
        if report.failed or (report.when == "call" and report.passed):
            with step(report.location[2].removeprefix("TestBackend.test_").replace("_", " ")):
                if report.failed:
                    raise AssertionError(report.longreprtext)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q", "-p", "no:cacheprovider", "-o", "python_files=program.py"], plugins=[Report()]) > 1)
