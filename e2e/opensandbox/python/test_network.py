"""What leaves a sandbox, and the ports that are reached in it."""

import os
import time

import httpx
import pytest
import websockets.sync.client

from conftest import eventually, out
from opensandbox.exceptions import SandboxApiException
from opensandbox.models.sandboxes import NetworkPolicy, NetworkRule

proves = pytest.mark.proves


def rules(policy):
    return policy.default_action, [(r.action, r.target) for r in policy.egress or []]


@proves("Sandbox.create", "Sandbox.patch_egress_rules")
def test_a_rule_by_name_is_refused_with_a_sentence(make):
    by_name = NetworkRule(action="allow", target="*.example.com")
    with pytest.raises(SandboxApiException) as refused:
        make(network_policy=NetworkPolicy(defaultAction="deny", egress=[by_name]))
    assert refused.value.status_code == 400 and "example.com" in refused.value.error.message
    sbx = make()
    with pytest.raises(SandboxApiException) as refused:
        sbx.patch_egress_rules([by_name])
    assert refused.value.status_code == 400
    assert rules(sbx.get_egress_policy()) == ("allow", [])


def test_the_egress_api_itself(make, wire):
    endpoint = make().get_endpoint(18080)

    def call(method, **kw):
        return wire.at(endpoint, method, "/policy", **kw)

    shown = call("GET").json()
    assert shown["status"] == "ok" and shown["mode"] == "allow_all"
    put = call("PUT", json={"defaultAction": "deny", "egress": [{"action": "allow", "target": "192.0.2.7"}]})
    assert put.status_code == 200 and put.json()["mode"] == "enforcing"
    assert call("PATCH", json=[{"action": "deny", "target": "192.0.2.8"}, {"action": "allow", "target": "192.0.2.8"}]).status_code == 200
    assert {(r["action"], r["target"]) for r in call("GET").json()["policy"]["egress"]} == {("allow", "192.0.2.7"), ("deny", "192.0.2.8")}
    assert "no matching" in call("DELETE", json=["192.0.2.9"]).json()["reason"]
    assert call("DELETE", json=["192.0.2.7", "192.0.2.8"]).json()["mode"] == "deny_all"
    assert call("POST", content=b"").json()["mode"] == "deny_all"
    for method, body in (("PUT", b"["), ("PATCH", b"{}"), ("PATCH", b'[{"action":"maybe","target":"192.0.2.1"}]'), ("PUT", b'{"defaultAction":"x"}')):
        assert call(method, content=body).status_code == 400, (method, body)
    assert call("PATCH", json=[{"action": "allow", "target": f"10.{i >> 8}.{i & 255}.1"} for i in range(5000)]).status_code == 413
    assert wire.at(endpoint, "GET", "/healthz").status_code == 200


@proves("Sandbox.credential_vault")
@pytest.mark.newest
def test_the_credential_vault_is_refused_with_a_sentence(sandbox):
    with pytest.raises(SandboxApiException) as refused:
        sandbox.credential_vault.get()
    assert len(refused.value.error.message) > 10


@proves("Sandbox.isolation")
@pytest.mark.newest
def test_isolated_sessions_say_that_they_are_not_there(sandbox):
    try:
        assert sandbox.isolation.capabilities().available is False
    except SandboxApiException as refused:
        assert refused.status_code in (501, 503) and refused.error.message


SERVER = """
import http.server, os
class H(http.server.BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'
    def answer(self):
        body = self.rfile.read(int(self.headers.get('content-length') or 0))
        text = (self.command + ' ' + self.path + ' ' + body.decode() + chr(10) + str(self.headers)).encode()
        self.send_response(200); self.send_header('content-length', str(len(text))); self.end_headers(); self.wfile.write(text)
    do_GET = do_POST = do_DELETE = do_PUT = do_PATCH = answer
http.server.ThreadingHTTPServer(('127.0.0.1', 8000), H).serve_forever()
"""


@pytest.fixture(scope="module")
def web(sandbox):
    """A web server in the shared sandbox."""
    from opensandbox.models.execd import RunCommandOpts

    sandbox.files.write_file("/tmp/web.py", SERVER)
    started = sandbox.commands.run("exec python3 /tmp/web.py", opts=RunCommandOpts(background=True))
    endpoint = sandbox.get_endpoint(8000)
    eventually(lambda: httpx.get(f"http://{endpoint.endpoint}/", headers=endpoint.headers).status_code == 200)
    yield endpoint
    sandbox.commands.interrupt(started.id)


@proves("Sandbox.get_endpoint")
def test_S3_52_a_port_is_reached_through_its_endpoint(web, wire):
    assert "://" not in web.endpoint and not web.endpoint.endswith("/")
    for method, body in (("GET", ""), ("POST", "posted"), ("DELETE", "with a body"), ("PUT", "p"), ("PATCH", "q")):
        answer = wire.at(web, method, "/some/path?q=a%20b", content=body, headers={"Authorization": "Bearer mine", "X-Mine": "1"})
        assert answer.text.splitlines()[0] == f"{method} /some/path?q=a%20b {body}".rstrip() or answer.text.startswith(f"{method} /some/path?q=a%20b {body}")
        said = answer.text.lower()
        assert "x-mine: 1" in said
        assert wire.key.lower() not in said
        for token in web.headers.values():
            assert token.lower() not in said


@proves("Sandbox.get_endpoint")
def test_a_port_wants_its_token_or_the_key(web, wire, sandbox):
    by_id = f"{wire.url}/sandboxes/{sandbox.id}/proxy/8000/"
    assert wire.client.get(by_id).status_code in (401, 403, 404)
    assert wire.client.get(by_id, headers=web.headers).status_code == 200
    assert wire.client.get(by_id, headers={k: "x" * len(v) for k, v in web.headers.items()}).status_code in (401, 403, 404)
    with_key = wire.client.get(by_id, headers={"OPEN-SANDBOX-API-KEY": wire.key})
    assert with_key.status_code == 200 and wire.key not in with_key.text
    foreign = wire.client.get(by_id, headers={"OPEN-SANDBOX-API-KEY": os.environ["OPENSANDBOX_SUITE_FOREIGN_KEY"]})
    assert foreign.status_code in (401, 403, 404)
    for path in ("/ping", "/command", "/files/info?path=/"):
        endpoint = sandbox.get_endpoint(44772)
        assert wire.client.get(f"http://{endpoint.endpoint}{path}").status_code in (401, 403, 404, 405)


@proves("Sandbox.get_endpoint")
def test_the_endpoint_of_a_web_server_opens_in_a_browser(web, wire, make):
    """Programs print it, or look there whether it is up, without the headers that came with it."""
    assert wire.client.get(f"http://{web.endpoint}/page").text.startswith("GET /page")
    closed = make(secure_access=True).get_endpoint(8000)
    assert wire.client.get(f"http://{closed.endpoint}/").status_code == 401


@proves("Sandbox.get_endpoint")
def test_a_port_where_nobody_listens(sandbox, wire):
    endpoint = sandbox.get_endpoint(8001)
    answer = wire.at(endpoint, "GET", "/")
    assert answer.status_code == 502
    assert set(answer.json()) >= {"code", "message"}


@proves("Sandbox.get_signed_endpoint")
def test_a_signed_endpoint_needs_no_header_until_it_expires(sandbox, web, wire):
    signed = sandbox.get_signed_endpoint(8000, int(time.time()) + 600)
    assert signed.endpoint != web.endpoint
    assert wire.client.get(f"http://{signed.endpoint}/x").text.startswith("GET /x")
    assert wire.client.get(f"http://{sandbox.get_signed_endpoint(44772, int(time.time()) + 600).endpoint}/ping").status_code == 200
    with pytest.raises(SandboxApiException) as past:
        sandbox.get_signed_endpoint(8000, int(time.time()) - 1)
    assert past.value.status_code == 400
    short = sandbox.get_signed_endpoint(8000, int(time.time()) + 20)
    eventually(lambda: wire.client.get(f"http://{short.endpoint}/").status_code in (401, 403, 404))
    broken = signed.endpoint[:-1] + ("a" if signed.endpoint[-1] != "a" else "b")
    assert wire.client.get(f"http://{broken}/").status_code in (400, 401, 403, 404)


@proves("Sandbox.get_endpoint")
def test_execds_own_port_proxy(sandbox, web, wire):
    endpoint = sandbox.get_endpoint(44772)
    assert endpoint.endpoint.endswith("/44772")
    assert wire.at(endpoint, "GET", "/proxy/8000/inner").text.startswith("GET /inner")


WEBSOCKET = """
import base64, hashlib, socket
s = socket.create_server(('127.0.0.1', 9000))
while True:
    c, _ = s.accept()
    head = b''
    while not head.endswith(b'\\r\\n\\r\\n'):
        more = c.recv(1)
        if not more:
            break
        head += more
    if not head:
        continue
    key = [l.split(b': ')[1] for l in head.split(b'\\r\\n') if l.lower().startswith(b'sec-websocket-key')][0]
    accept = base64.b64encode(hashlib.sha1(key + b'258EAFA5-E914-47DA-95CA-C5AB0DC85B11').digest())
    c.sendall(b'HTTP/1.1 101 Switching Protocols\\r\\nUpgrade: websocket\\r\\nConnection: Upgrade\\r\\nSec-WebSocket-Accept: ' + accept + b'\\r\\n\\r\\n')
    c.sendall(b'\\x81\\x05hello')
    c.recv(100)
    c.close()
"""


@proves("Sandbox.get_endpoint")
def test_a_websocket_passes(make):
    from opensandbox.models.execd import RunCommandOpts

    sbx = make()
    sbx.files.write_file("/tmp/ws.py", WEBSOCKET)
    sbx.commands.run("exec python3 /tmp/ws.py", opts=RunCommandOpts(background=True))
    endpoint = sbx.get_endpoint(9000)
    eventually(lambda: sbx.commands.run("bash -c 'exec 3<>/dev/tcp/127.0.0.1/9000'").exit_code == 0)
    # The probe above took the server's first turn and left.
    with websockets.sync.client.connect(f"ws://{endpoint.endpoint}/", additional_headers=endpoint.headers) as ws:
        assert ws.recv(timeout=100) == "hello"
