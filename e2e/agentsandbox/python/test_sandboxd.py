"""The newer runtime: files over HTTP and processes over gRPC, through kubectl to the sandbox's own ports."""

import pytest
from conftest import NAMESPACE, POOL, VERSION

if VERSION < (1, 0):
    pytest.skip("clients know it since 1.0", allow_module_level=True)
pytest.importorskip("grpc")

from k8s_agent_sandbox import SandboxClient  # noqa: E402
from k8s_agent_sandbox.models import SandboxdPodTunnelConnectionConfig  # noqa: E402


@pytest.fixture(scope="module")
def sandbox():
    client = SandboxClient(connection_config=SandboxdPodTunnelConnectionConfig())
    yield client.create_sandbox(POOL, namespace=NAMESPACE)
    client.delete_all()


def test_commands(sandbox):
    got = sandbox.commands.run("echo out; echo err >&2; exit 3")
    assert (got.stdout, got.stderr, got.exit_code) == ("out\n", "err\n", 3)
    assert sandbox.commands.run("pwd").stdout == "/workspace\n"
    assert sandbox.commands.run('echo "$A"; pwd', env={"A": "b c"}, cwd="/tmp").stdout == "b c\n/tmp\n"


def test_over_its_time(sandbox):
    got = sandbox.commands.run("echo run >> counter; sleep 3600", command_timeout=10)
    assert (got.exit_code, got.timed_out) == (124, True)
    assert sandbox.commands.run("cat counter; pgrep -x sleep").stdout == "run\n"


@pytest.mark.parametrize(("path", "place"), [
    ("x", "/workspace/x"), ("a/b/ünï \"q\" 100%20", "/workspace/a/b/ünï \"q\" 100%20"), ("/tmp/deep/x", "/tmp/deep/x"), ("/workspace/y", "/workspace/y"),
])
def test_files(sandbox, path, place):
    content = bytes(range(256))
    sandbox.files.write(path, content)
    assert sandbox.files.read(path) == content
    assert sandbox.files.exists(path)
    assert sandbox.commands.run(f"wc -c < '{place}'").stdout.strip() == "256"
    sandbox.files.delete(path)
    assert not sandbox.files.exists(path)


def test_listing(sandbox):
    sandbox.commands.run("mkdir -p listed/sub && printf 1234 > listed/file")
    got = {e.name: (e.type, e.size) for e in sandbox.files.list("listed")}
    assert got["sub"][0] == "directory" and got["file"] == ("file", 4)
