"""What the adapter's description promises."""

import importlib.metadata
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import NAMESPACE, client, raw
from deepagents.backends.sandbox import BaseSandbox
from langchain_kubernetes_agent_sandbox import KubernetesAgentSandbox

OLD = importlib.metadata.version("k8s-agent-sandbox").startswith("0.4.")
EXAMPLE = Path(__file__).parents[3] / "examples" / "k8s-agent-sandbox"


def test_S1_2_S1_3_S1_6_S1_34_the_adapter_takes_a_sandbox_that_is_there(backend):
    assert isinstance(backend, BaseSandbox)
    assert backend.id == backend.sandbox.sandbox_id
    assert backend.sandbox.is_active


def test_S1_23_S1_25_execute(backend):
    got = backend.execute("echo hello; exit 7")
    assert (got.output, got.exit_code, got.truncated) == ("hello\n", 7, False)


def test_S1_27_S1_28_S1_29_S1_30_S1_32_timeouts(backend):
    begun = time.monotonic()
    got = backend.execute("echo run >> counter; echo before; sleep 3600", timeout=20)
    assert (got.exit_code, got.output) == (124, "before\n")
    assert time.monotonic() - begun < 60
    assert backend.execute("cat counter").output == "run\n"
    hasty = KubernetesAgentSandbox(sandbox=backend.sandbox, timeout=1)
    assert hasty.execute("sleep 3600").exit_code == 124
    assert hasty.execute("sleep 1.5; echo done", timeout=200).output == "done\n"


def test_S1_16_S1_17_S1_18_S1_19_files(backend):
    content = bytes(range(256))
    away = "/app/b" if OLD else "/tmp/deep/er/b"  # the client of 0.4 sends the last part of a path only
    up = backend.upload_files([("/app/a", content), ("relative", content), (away, content)])
    assert [u.error for u in up] == [None, "invalid_path", None]
    down = backend.download_files([away, "relative", "/missing", "/app/a"])
    assert [(d.content, d.error) for d in down] == [(content, None), (None, "invalid_path"), (None, "file_not_found"), (content, None)]


def test_S1_13_S1_14_until_terminate(backend):
    own = KubernetesAgentSandbox(sandbox=raw())
    own.execute("echo kept > kept")
    assert own.execute("cat kept").output == "kept\n"
    own.sandbox.terminate()
    assert not own.sandbox.is_active
    begun = time.monotonic()
    with pytest.raises(Exception):
        own.execute("true")
    assert time.monotonic() - begun < 100


def test_clean_up_by_the_id_of_the_sandbox():
    made = raw()
    own = client()
    own.delete_sandbox(made.sandbox_id, namespace=NAMESPACE)
    end = time.monotonic() + 120
    while made.sandbox_id in own.list_all_sandboxes(namespace=NAMESPACE):
        assert time.monotonic() < end, "it is still there"
        time.sleep(0.1)


@pytest.mark.parametrize(("program", "says"), [
    ("backend", "2 3 5 7 11 13 17 19 23 29\nhint.txt\nprimes.py\n"),
    ("tool", "no sandbox yet\nexit=0\n42 is \"the\" sum\nterminated\n"),
], ids=["backend", "tool"])
def test_S1_7_S1_9_S1_37_S1_38_the_example_runs(program, says):
    env = {**os.environ, "LANGSMITH_TRACING": "false"}
    if os.environ.get("AGENT_SANDBOX_WAY") != "tunnel":
        env["SANDBOX_ROUTER_URL"] = os.environ["AGENT_SANDBOX_ROUTER_URL"]
    done = subprocess.run([sys.executable, "-B", "main.py", program, "--scripted"], cwd=EXAMPLE, env=env, capture_output=True, text=True, timeout=1800)
    assert (done.stdout, done.returncode) == (says, 0), done.stdout + done.stderr
