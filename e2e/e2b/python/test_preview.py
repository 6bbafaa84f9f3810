"""Ports that a program opens in a sandbox."""

import json

import pytest
import websockets.sync.client
from conftest import eventually
from test_network import ECHO

SSE = """
import http.server, os, time
class H(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header('Content-Type', 'text/event-stream'); self.end_headers()
        for i in range(3):
            self.wfile.write(f'data: {i}\\n\\n'.encode()); self.wfile.flush()
            while not os.path.exists(f'/tmp/heard-{i}'): time.sleep(0.01)
http.server.ThreadingHTTPServer(('0.0.0.0', 8001), H).serve_forever()
"""

# A WebSocket echo without a library: enough of RFC 6455 for short unfragmented messages.
WEBSOCKET = """
import base64, hashlib, socketserver
class H(socketserver.StreamRequestHandler):
    def handle(self):
        headers = {}
        self.rfile.readline()
        while (line := self.rfile.readline().strip()):
            k, _, v = line.decode().partition(': '); headers[k.lower()] = v
        accept = base64.b64encode(hashlib.sha1((headers['sec-websocket-key'] + '258EAFA5-E914-47DA-95CA-C5AB0DC85B11').encode()).digest()).decode()
        self.wfile.write(f'HTTP/1.1 101 Switching Protocols\\r\\nUpgrade: websocket\\r\\nConnection: Upgrade\\r\\nSec-WebSocket-Accept: {accept}\\r\\n\\r\\n'.encode())
        while True:
            head = self.rfile.read(2)
            if len(head) < 2 or head[0] & 15 == 8: return
            n = head[1] & 127; mask = self.rfile.read(4); data = bytes(b ^ mask[i % 4] for i, b in enumerate(self.rfile.read(n)))
            self.wfile.write(bytes([129, n]) + data)
socketserver.ThreadingTCPServer(('0.0.0.0', 8002), H).serve_forever()
"""


@pytest.fixture(scope="module")
def served(sandbox, wire):
    for name, text in (("echo", ECHO), ("sse", SSE), ("ws", WEBSOCKET)):
        sandbox.files.write(f"/tmp/{name}.py", text)
        sandbox.commands.run(f"python3 /tmp/{name}.py 8000", background=True, timeout=0)
    for port in (8000, 8001, 8002):
        sandbox.commands.run(f"for i in $(seq 1200); do ss -Htln sport = :{port} | grep -q . && exit 0; sleep 0.1; done; exit 1", timeout=0)
    return sandbox.sandbox_id


@pytest.mark.proves("preview: HTTP")
def test_a_port_answers_by_header(served, wire):
    got = wire.data("GET", served, 8000, "/a/b%20c?x=1&y")
    assert got.status_code == 200 and got.json()["path"] == "/a/b%20c?x=1&y"
    body = b"x" * 1_000_000
    assert wire.data("POST", served, 8000, "/", content=body).content == body


@pytest.mark.proves("preview: HTTP")
def test_what_guards_the_server_never_reaches_a_sandbox(sandbox, served, wire):
    sent = {
        "X-API-Key": wire.key,
        "Authorization": f"Bearer {wire.key}",
        "X-Access-Token": sandbox._envd_access_token,
        "E2B-Traffic-Access-Token": "secret-traffic",
        "X-Mine": "kept",
    }
    headers = wire.data("GET", served, 8000, "/", sent).json()["headers"]
    assert headers["x-mine"] == "kept"
    text = json.dumps(headers)
    for secret in (wire.key, sandbox._envd_access_token, "secret-traffic"):
        assert secret not in text
    assert not [h for h in headers if h.startswith("e2b-")]


@pytest.mark.proves("preview: HTTP")
def test_a_login_of_the_sandboxs_own_reaches_it(served, wire):
    headers = wire.data("GET", served, 8000, "/", {"Authorization": "Bearer of-the-app", "Cookie": "session=app"}).json()["headers"]
    assert headers["authorization"] == "Bearer of-the-app" and headers["cookie"] == "session=app"


@pytest.mark.proves("preview: server-sent events")
def test_events_come_as_they_are_sent(sandbox, served, wire):
    """The server sends the next event when the test has the one before."""
    seen = []
    routing = {"E2b-Sandbox-Id": served, "E2b-Sandbox-Port": "8001"}
    with wire.client.stream("GET", wire.data_url + "/", headers=routing) as r:
        for line in r.iter_lines():
            if line.startswith("data:"):
                sandbox.files.write(f"/tmp/heard-{len(seen)}", "")
                seen.append(line)
    assert seen == ["data: 0", "data: 1", "data: 2"]


@pytest.mark.proves("preview: WebSocket")
def test_a_websocket_passes(served, wire):
    url = wire.data_url.replace("http", "ws", 1) + "/chat"
    routing = {"E2b-Sandbox-Id": served, "E2b-Sandbox-Port": "8002"}
    with websockets.sync.client.connect(url, additional_headers=routing, compression=None) as ws:
        for text in ("one", "two ü"):
            ws.send(text)
            assert ws.recv() == text


@pytest.mark.proves("preview: errors")
def test_a_closed_port_is_told(served, wire):
    got = wire.data("GET", served, 8765, "/")
    assert got.status_code == 502
    assert got.json() == {"sandboxId": served, "message": "The sandbox is running but port is not open", "port": 8765, "code": 502}
    page = wire.data("GET", served, 8765, "/", {"Accept": "text/html"})
    assert page.status_code == 502 and "text/html" in page.headers["content-type"]


@pytest.mark.parametrize("port", [49983, 49999, 8000])
@pytest.mark.proves("preview: errors")
def test_a_gone_sandbox_is_told_on_every_port(make, wire, port):
    sbx = make()
    sbx.kill()
    want = {"sandboxId": sbx.sandbox_id, "message": "The sandbox was not found", "code": 502}
    got = wire.data("GET", sbx.sandbox_id, port, "/health")
    assert (got.status_code, got.json()) == (502, want)
    unknown = wire.data("GET", "nonexistingsandbox", port, "/anything")
    assert unknown.status_code == 502 and unknown.json()["message"] == "The sandbox was not found"


@pytest.mark.proves("preview: auto-resume")
def test_a_request_to_a_port_wakes_a_sandbox(make, wire):
    sbx = make(lifecycle={"on_timeout": "pause", "auto_resume": True})
    sbx.commands.run("cd /tmp && python3 -m http.server 8000", background=True, timeout=0)
    eventually(lambda: wire.data("GET", sbx.sandbox_id, 8000, "/").status_code == 200)
    sbx.pause()
    assert wire.data("GET", sbx.sandbox_id, 8000, "/").status_code == 200
    assert sbx.is_running()
