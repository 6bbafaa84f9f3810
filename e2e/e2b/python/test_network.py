"""What may leave a sandbox, and what may come in."""

import socket
import threading

import pytest
from conftest import eventually

from e2b import Sandbox, SandboxException, SandboxNotFoundException

GET = "import socket; socket.create_connection(('{}', {}), 2).close(); print('in')"


def reaches(sbx, host, port):
    out = sbx.commands.run(f'python3 -c "{GET.format(host, port)}" 2>&1 || true').stdout
    return out.endswith("in\n")


@pytest.mark.proves("Sandbox.update_network")
def test_a_change_of_nothing_is_not_found():
    with pytest.raises(SandboxNotFoundException):
        Sandbox.update_network("nonexistingsandbox", {"deny_out": ["1.1.1.1"]})


@pytest.mark.proves("Sandbox.create", "Sandbox.get_info")
def test_info_shows_the_network(make):
    sbx = make(network={"deny_out": ["0.0.0.0/0"], "allow_out": ["1.1.1.1", "8.8.8.0/24"], "allow_public_traffic": False})
    got = sbx.get_info().network
    assert got["allow_out"] == ["1.1.1.1", "8.8.8.0/24"] and got["deny_out"] == ["0.0.0.0/0"]
    assert got["allow_public_traffic"] is False
    assert make(allow_internet_access=False).get_info().allow_internet_access is False


@pytest.mark.proves("Sandbox.create")
def test_S0_65_the_host_and_its_neighbours_are_never_reached(make):
    listener = socket.create_server(("0.0.0.0", 0))
    threading.Thread(target=lambda: listener.accept(), daemon=True).start()
    sbx = make()
    gateway = sbx.commands.run("ip route 2>/dev/null | awk '/default/ {print $3}' || true").stdout.strip()
    for host in filter(None, ["169.254.169.254", "10.0.0.1", "192.168.0.1", gateway]):
        assert not reaches(sbx, host, listener.getsockname()[1])
    listener.close()


@pytest.mark.parametrize(
    "network",
    [
        {"deny_out": ["example.com"]},
        {"allow_out": ["example.com"]},
        {"allow_out": ["not an address"]},
        {"deny_out": ["0.0.0.0/0"], "allow_out": ["*.example.com"]},
        {"egress_proxy": {"address": "proxy.example.com:1080"}},
        {"rules": {"api.example.com": [{"transform": {"headers": {"X": "y"}}}]}},
    ],
    ids=["deny a name", "allow a name alone", "nonsense", "names", "proxy", "header rules"],
)
@pytest.mark.proves("Sandbox.create")
def test_what_the_network_cannot_do_is_told(network):
    with pytest.raises(SandboxException, match="40[03]|501"):
        Sandbox.create(network=network, timeout=30)


@pytest.mark.proves("Sandbox.create")
def test_private_traffic_needs_its_token(make, wire):
    sbx = make(network={"allow_public_traffic": False})
    assert sbx.traffic_access_token
    sbx.commands.run("cd /tmp && python3 -m http.server 8000", background=True, timeout=0)
    token = {"E2B-Traffic-Access-Token": sbx.traffic_access_token}

    def get(headers):
        return wire.data("GET", sbx.sandbox_id, 8000, "/", headers).status_code

    eventually(lambda: get(token) == 200)
    assert get({}) == 403
    assert get({"E2B-Traffic-Access-Token": "0" * 64}) == 403
    assert sbx.commands.run("echo envd needs none").exit_code == 0


@pytest.mark.proves("Sandbox.create")
def test_a_public_sandbox_has_no_traffic_token(sandbox):
    assert sandbox.traffic_access_token is None


@pytest.mark.proves("Sandbox.create")
def test_the_host_of_requests_may_be_masked(make, wire):
    sbx = make(network={"mask_request_host": "app-${PORT}.example.com"})
    sbx.files.write("/tmp/echo.py", ECHO)
    sbx.commands.run("python3 /tmp/echo.py 8000", background=True, timeout=0)
    eventually(lambda: wire.data("GET", sbx.sandbox_id, 8000, "/").status_code == 200)
    assert wire.data("GET", sbx.sandbox_id, 8000, "/").json()["headers"]["host"] == "app-8000.example.com"


ECHO = """
import http.server, json, sys
class H(http.server.BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'
    def do_GET(self):
        body = json.dumps({'path': self.path, 'headers': {k.lower(): v for k, v in self.headers.items()}}).encode()
        self.send_response(200); self.send_header('Content-Length', str(len(body))); self.end_headers(); self.wfile.write(body)
    def do_POST(self):
        body = self.rfile.read(int(self.headers['Content-Length']))
        self.send_response(201); self.send_header('Content-Length', str(len(body))); self.end_headers(); self.wfile.write(body)
    def log_message(self, *a): pass
http.server.ThreadingHTTPServer(('127.0.0.1', int(sys.argv[1])), H).serve_forever()
"""
