"""The command line program `osb`. Most of it is run inside this process: a new one needs half a second to load the SDK."""

import json
import os
import subprocess
import sys

import pytest

from conftest import IMAGE, NEWEST, eventually, kill
from opensandbox import SandboxSync

pytestmark = pytest.mark.skipif(not NEWEST, reason="osb came after the older release of the SDK")
proves = pytest.mark.proves


def osb(*args, ok=True):
    from click.testing import CliRunner
    from opensandbox_cli.main import cli

    done = CliRunner().invoke(cli, ["--no-color", *args])
    assert (done.exit_code == 0) == ok, (args, done.exit_code, done.output, done.exception)
    return done.stdout


def parsed(*args):
    return json.loads(osb(*args, "-o", "json"))


@pytest.fixture(scope="module")
def box():
    sbx = SandboxSync.create(IMAGE)
    yield sbx.id
    kill(sbx)


@proves("osb sandbox create", "osb sandbox get", "osb sandbox list", "osb sandbox kill")
def test_a_sandbox_from_the_command_line(tag):
    made = parsed("sandbox", "create", "--image", IMAGE, "--timeout", "50m", "-e", "A=1", "-m", f"run={tag}", "--resource", "cpu=1", "--resource", "memory=512Mi")
    got = parsed("sandbox", "get", made["id"])
    assert got["status"]["state"] == "Running" and got["metadata"] == {"run": tag}
    listed = parsed("sandbox", "list", "-m", f"run={tag}", "-s", "Running")
    assert made["id"] in json.dumps(listed)
    assert tag in osb("sandbox", "get", made["id"])
    osb("sandbox", "kill", made["id"])
    osb("sandbox", "get", made["id"], ok=False)


@proves("osb command run")
def test_the_program_as_a_person_runs_it(box):
    program = os.path.join(os.path.dirname(sys.executable), "osb")
    done = subprocess.run([program, "command", "run", box, "--", "echo", "hello"], capture_output=True, text=True, timeout=600, stdin=subprocess.DEVNULL)
    assert (done.returncode, done.stdout.strip()) == (0, "hello"), done.stderr
    failed = subprocess.run([program, "sandbox", "get", "none"], capture_output=True, text=True, timeout=600, stdin=subprocess.DEVNULL)
    assert failed.returncode != 0 and "none" in failed.stdout + failed.stderr


@proves("osb sandbox health", "osb sandbox metrics", "osb sandbox endpoint", "osb sandbox renew")
def test_looking_at_a_sandbox(box):
    assert "true" in json.dumps(parsed("sandbox", "health", box)).lower()
    assert parsed("sandbox", "metrics", box)["cpu_count"] == 1
    assert box in parsed("sandbox", "endpoint", box, "-p", "8000")["endpoint"]
    osb("sandbox", "renew", box, "-t", "30m")


@proves("osb sandbox pause", "osb sandbox resume")
def test_pause_and_resume(tag):
    made = parsed("sandbox", "create", "--image", IMAGE, "-m", f"run={tag}")["id"]
    osb("sandbox", "pause", made)
    assert parsed("sandbox", "get", made)["status"]["state"] == "Paused"
    osb("sandbox", "resume", made)
    assert "ok" in osb("command", "run", made, "-o", "raw", "--", "echo", "ok")
    osb("sandbox", "kill", made)


@proves("osb command run", "osb command status", "osb command logs", "osb command interrupt")
def test_commands(box):
    assert osb("command", "run", box, "-o", "raw", "--", "echo", "hello").strip() == "hello"
    assert osb("command", "run", box, "-o", "raw", "--argv", "--", "printf", "%s", "$HOME").strip() == "$HOME"
    assert osb("command", "run", box, "-w", "/usr", "-o", "raw", "--", "pwd").strip() == "/usr"
    started = json.loads(osb("command", "run", box, "-d", "-o", "json", "--", "sh", "-c", "echo in the back; sleep 3600"))
    ident = started["execution_id"]
    assert parsed("command", "status", box, ident)["running"] is True
    eventually(lambda: "in the back" in osb("command", "logs", box, ident))
    osb("command", "interrupt", box, ident)
    eventually(lambda: parsed("command", "status", box, ident)["running"] is False)


@proves("osb command session create", "osb command session run", "osb command session delete")
def test_sessions(box):
    made = parsed("command", "session", "create", box)
    ident = made.get("session_id") or made.get("id")
    osb("command", "session", "run", box, ident, "--", "export", "A=1")
    osb("command", "session", "run", box, ident, "--", "cd", "/usr")
    assert "A=1" in osb("command", "session", "run", box, ident, "--", "env").splitlines()
    assert osb("command", "session", "run", box, ident, "--", "pwd").split() == ["/usr"]
    osb("command", "session", "delete", box, ident)


@proves("osb file write", "osb file cat", "osb file upload", "osb file download", "osb file info", "osb file mkdir", "osb file mv", "osb file replace", "osb file rm", "osb file rmdir", "osb file search", "osb file chmod")
def test_files(box, tag, tmp_path):
    folder = f"/tmp/{tag}"
    osb("file", "mkdir", box, folder)
    osb("file", "write", box, f"{folder}/a", "-c", "one two")
    assert osb("file", "cat", box, f"{folder}/a").strip() == "one two"
    osb("file", "replace", box, f"{folder}/a", "--old", "two", "--new", "three")
    osb("file", "chmod", box, f"{folder}/a", "--mode", "0600")
    assert "600" in json.dumps(parsed("file", "info", box, f"{folder}/a"))
    local = tmp_path / "local"
    local.write_bytes(bytes(range(256)))
    osb("file", "upload", box, str(local), f"{folder}/b")
    osb("file", "mv", box, f"{folder}/b", f"{folder}/c")
    osb("file", "download", box, f"{folder}/c", str(tmp_path / "back"))
    assert (tmp_path / "back").read_bytes() == bytes(range(256))
    assert f"{folder}/c" in json.dumps(parsed("file", "search", box, folder, "--pattern", "c"))
    osb("file", "rm", box, f"{folder}/c")
    assert osb("file", "cat", box, f"{folder}/a").strip() == "one three"
    osb("file", "rmdir", box, folder)
    osb("file", "cat", box, f"{folder}/a", ok=False)


@proves("osb egress get", "osb egress patch")
def test_egress(box):
    osb("egress", "patch", box, "--rule", "deny=192.0.2.1")
    assert "192.0.2.1" in osb("egress", "get", box, "-o", "json")


@proves("osb snapshot create", "osb snapshot get", "osb snapshot list", "osb snapshot delete")
def test_snapshots(box, tag):
    made = parsed("snapshot", "create", box, "--name", tag)["id"]
    eventually(lambda: parsed("snapshot", "get", made)["status"]["state"] == "Ready")
    assert made in json.dumps(parsed("snapshot", "list"))
    osb("snapshot", "delete", made)
    osb("snapshot", "get", made, ok=False)


@proves("osb diagnostics logs", "osb diagnostics events", "osb devops summary", "osb devops inspect")
def test_diagnostics(box):
    osb("diagnostics", "logs", box, "-s", "container")
    assert parsed("diagnostics", "events", box, "-s", "all")["kind"] == "events"
    assert box in osb("devops", "summary", box)
    assert box in osb("devops", "inspect", box)
