"""The Connect calls of envd as bytes: what the SDKs never send, and what they never show."""

import base64
import json
import struct
import threading
import time

import pytest
from conftest import eventually


class Rpc:
    def __init__(self, wire, sbx):
        self.wire, self.sbx = wire, sbx
        self.token = {"X-Access-Token": sbx._envd_access_token, "Connect-Protocol-Version": "1"}

    def unary(self, method, body, headers=None):
        return self.wire.data("POST", self.sbx.sandbox_id, 49983, "/" + method, {**self.token, **(headers or {})}, json=body)

    def stream(self, method, body, headers=None):
        """Sends one envelope and gives back the messages and how the stream ended."""
        text = json.dumps(body).encode()
        got = self.wire.data(
            "POST", self.sbx.sandbox_id, 49983, "/" + method,
            {**self.token, "Content-Type": "application/connect+json", **(headers or {})}, content=struct.pack(">BI", 0, len(text)) + text,
        )
        assert got.status_code == 200 and got.headers["content-type"] == "application/connect+json", got.text
        return frames(got.content)

    def live(self, method, body, headers):
        """Sends one envelope and gives back each message as it comes, the end too."""
        text, data = json.dumps(body).encode(), b""
        routing = {"E2b-Sandbox-Id": self.sbx.sandbox_id, "E2b-Sandbox-Port": "49983", "Content-Type": "application/connect+json"}
        with self.wire.client.stream(
            "POST", f"{self.wire.data_url}/{method}", headers={**self.token, **routing, **headers}, content=struct.pack(">BI", 0, len(text)) + text,
        ) as got:
            for chunk in got.iter_bytes():
                data += chunk
                while len(data) >= 5 and len(data) >= 5 + (size := struct.unpack(">I", data[1:5])[0]):
                    yield json.loads(data[5 : 5 + size])
                    data = data[5 + size :]


def frames(data):
    messages, end = [], None
    while data:
        flags, size = struct.unpack(">BI", data[:5])
        message, data = json.loads(data[5 : 5 + size]), data[5 + size :]
        if flags & 2:
            end = message
        else:
            messages.append(message)
    return messages, end


@pytest.fixture(scope="module")
def rpc(wire, sandbox):
    return Rpc(wire, sandbox)


def start(command, **kw):
    return {"process": {"cmd": "/bin/bash", "args": ["-c", command], **kw}}


@pytest.mark.proves("envd: Process.Start")
def test_events_of_a_command(rpc):
    messages, end = rpc.stream("process.Process/Start", start("printf out; printf err >&2; exit 3"))
    events = [m["event"] for m in messages]
    assert list(events[0]) == ["start"] and events[0]["start"]["pid"] > 0
    data = {k: base64.b64decode(v) for e in events[1:-1] for k, v in e["data"].items()}
    assert data == {"stdout": b"out", "stderr": b"err"}
    assert events[-1]["end"] == {"exitCode": 3, "exited": True, "status": "exit status 3", "error": "exit status 3"}
    assert end == {}


@pytest.mark.proves("envd: Process.Start")
def test_how_ends_are_worded(rpc):
    good = rpc.stream("process.Process/Start", start("true"))[0][-1]["event"]["end"]
    assert good == {"exited": True, "status": "exit status 0"}
    killed = rpc.stream("process.Process/Start", start("kill -9 $$"))[0][-1]["event"]["end"]
    assert killed == {"exitCode": -1, "status": "signal: killed", "error": "signal: killed"}
    terminated = rpc.stream("process.Process/Start", start("kill $$"))[0][-1]["event"]["end"]
    assert terminated["status"] == "signal: terminated"


@pytest.mark.proves("envd: Process.Start")
def test_what_cannot_be_started_is_an_invalid_argument(rpc):
    for body in (start("true", cwd="/no/such"), {"process": {"cmd": "/no/such/program"}}, {}):
        _, end = rpc.stream("process.Process/Start", body)
        assert end["error"]["code"] == "invalid_argument", (body, end)


@pytest.mark.slow
@pytest.mark.proves("envd: keepalives")
def test_an_idle_stream_is_kept_alive(rpc, sandbox, folder):
    seen, begun = [], time.monotonic()
    for message in rpc.live("process.Process/Start", start(f"until [ -e {folder}/go ]; do sleep 0.01; done"), {"Keepalive-Ping-Interval": "1"}):
        seen += list(message.get("event", {}))
        if seen == ["start", "keepalive", "keepalive"]:
            assert time.monotonic() - begun > 1.9
            sandbox.files.write(f"{folder}/go", "")
    assert seen[:3] == ["start", "keepalive", "keepalive"] and seen[-1] == "end", seen
    assert set(seen[3:-1]) <= {"keepalive"}, seen


@pytest.mark.proves("envd: Process.Start")
def test_the_header_is_the_commands_lifetime(rpc, sandbox):
    messages, end = rpc.stream("process.Process/Start", start("exec -a shortlived sleep 3600"), {"Connect-Timeout-Ms": "500"})
    assert end["error"]["code"] == "deadline_exceeded"
    eventually(lambda: sandbox.commands.run("pgrep -cf '^shortlived' || true").stdout == "0\n")


@pytest.mark.proves("envd: tags and signals")
def test_a_tag_finds_a_process(rpc, sandbox, folder, tag):
    got = {}
    body = {**start(f"trap 'exit 9' TERM; touch {folder}/trapped; while :; do sleep 0.05; done"), "tag": tag}
    thread = threading.Thread(target=lambda: got.update(zip(("messages", "end"), rpc.stream("process.Process/Start", body))))
    thread.start()
    found = eventually(lambda: [p for p in rpc.unary("process.Process/List", {}).json().get("processes", []) if p.get("tag") == tag])
    assert found[0]["config"]["args"][0] == "-c"
    eventually(lambda: sandbox.files.exists(f"{folder}/trapped"))
    sent = rpc.unary("process.Process/SendSignal", {"process": {"tag": tag}, "signal": "SIGNAL_SIGTERM"})
    assert (sent.status_code, sent.json()) == (200, {})
    thread.join(120)
    assert got["messages"][-1]["event"]["end"]["exitCode"] == 9
    missing = rpc.unary("process.Process/SendSignal", {"process": {"pid": 999999}, "signal": "SIGNAL_SIGKILL"})
    assert missing.status_code == 404 and missing.json()["code"] == "not_found"


@pytest.mark.parametrize(
    "method, body, status, code",
    [
        ("filesystem.Filesystem/Stat", {"path": "/nothing"}, 404, "not_found"),
        ("filesystem.Filesystem/ListDir", {"path": "/etc/hostname"}, 400, "invalid_argument"),
        ("filesystem.Filesystem/MakeDir", {"path": "/tmp"}, 409, "already_exists"),
        ("filesystem.Filesystem/MakeDir", {"path": "/etc/hostname"}, 400, "invalid_argument"),
        ("filesystem.Filesystem/Move", {"source": "/nothing", "destination": "/tmp/x"}, 404, "not_found"),
        ("filesystem.Filesystem/CreateWatcher", {"path": "/nothing"}, 404, "not_found"),
        ("filesystem.Filesystem/CreateWatcher", {"path": "/etc/hostname"}, 400, "invalid_argument"),
        ("filesystem.Filesystem/GetWatcherEvents", {"watcherId": "none"}, 404, "not_found"),
        ("filesystem.Filesystem/RemoveWatcher", {"watcherId": "none"}, 404, "not_found"),
        ("process.Process/Update", {"process": {"pid": 999999}, "pty": {"size": {"cols": 1, "rows": 1}}}, 404, "not_found"),
        ("process.Process/SendInput", {"process": {"pid": 999999}, "input": {"stdin": ""}}, 404, "not_found"),
        ("process.Process/CloseStdin", {"process": {"pid": 999999}}, 404, "not_found"),
        ("process.Process/NoSuchMethod", {}, 404, None),
    ],
)
@pytest.mark.proves("envd: error codes")
def test_errors_have_their_codes(rpc, method, body, status, code):
    got = rpc.unary(method, body)
    assert got.status_code == status, got.text
    if code:
        assert got.json()["code"] == code and got.json()["message"]


@pytest.mark.proves("envd: error codes")
def test_an_unknown_user_is_unauthenticated(rpc):
    basic = {"Authorization": "Basic " + base64.b64encode(b"ghost:").decode()}
    got = rpc.unary("filesystem.Filesystem/Stat", {"path": "/"}, basic)
    assert (got.status_code, got.json()["code"], got.json()["message"]) == (401, "unauthenticated", "invalid username: 'ghost'")


@pytest.mark.proves("envd: unknown fields")
def test_fields_that_nobody_knows_are_ignored(rpc):
    got = rpc.unary("filesystem.Filesystem/Stat", {"path": "/etc/hostname", "ofTheFuture": [1]})
    assert got.status_code == 200
    entry = got.json()["entry"]
    assert isinstance(entry["size"], str) and entry["type"] == "FILE_TYPE_FILE" and entry["modifiedTime"].endswith("Z")


@pytest.mark.proves("envd: WatchDir")
def test_a_watch_begins_with_start_and_ends_at_its_time(rpc):
    messages, end = rpc.stream("filesystem.Filesystem/WatchDir", {"path": "/tmp"}, {"Connect-Timeout-Ms": "4000"})
    assert messages[0] == {"start": {}}
    assert end["error"]["code"] == "deadline_exceeded"


@pytest.mark.proves("envd: CORS")
def test_browsers_may_call(rpc, wire, sandbox):
    asks = {"Origin": "https://app.example.com", "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type,x-access-token,connect-protocol-version"}
    for port, path in ((49983, "/filesystem.Filesystem/Stat"), (49983, "/files"), (49999, "/execute")):
        got = wire.data("OPTIONS", sandbox.sandbox_id, port, path, asks)
        assert got.status_code in (200, 204), (port, path, got.text)
        assert got.headers["access-control-allow-origin"] in ("*", "https://app.example.com")


@pytest.mark.proves("envd: POST /files/compose")
def test_files_are_composed(rpc, wire, sandbox, folder):
    for name in "ab":
        sandbox.files.write(f"{folder}/{name}", name)
    body = {"source_paths": [f"{folder}/a", f"{folder}/b"], "destination": f"{folder}/ab"}
    got = wire.data("POST", sandbox.sandbox_id, 49983, "/files/compose", rpc.token, json=body)
    assert got.status_code in (200, 201, 204), got.text
    assert sandbox.files.read(f"{folder}/ab") == "ab"


@pytest.mark.slow
@pytest.mark.proves("interpreter: keepalives")
def test_an_idle_execution_is_kept_alive(wire, make_code):
    sbx = make_code()
    token = {"X-Access-Token": sbx._envd_access_token}
    got = wire.data("POST", sbx.sandbox_id, 49999, "/execute", token, json={"code": "import time; time.sleep(5.5)"})
    assert "keepalive" in [json.loads(line)["type"] for line in got.text.splitlines()]
