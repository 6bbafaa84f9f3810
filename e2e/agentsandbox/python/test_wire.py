"""What clients of another make may send: the answers to what is wrong, and what nobody may learn."""

import json
import os
import subprocess
import urllib.error
import urllib.request

import pytest
from conftest import NAMESPACE

ROUTER = os.environ["AGENT_SANDBOX_ROUTER_URL"]  # its path has a token
PLAIN = "/".join(ROUTER.split("/")[:3])


def ask(path, method="GET", data=None, base=ROUTER, **headers):
    """Sends a request and gives status, body and headers of the answer."""
    request = urllib.request.Request(base + path, method=method, data=data, headers={k.replace("_", "-"): v for k, v in headers.items()})
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, answer.read(), answer.headers
    except urllib.error.HTTPError as error:
        return error.code, error.read(), error.headers


def here(sandbox, **more):
    return {"X_Sandbox_ID": sandbox.sandbox_id, "X_Sandbox_Namespace": NAMESPACE, **more}


def test_the_token_in_the_url_lets_in_and_nothing_else_does(sandbox):
    assert ask("/", **here(sandbox))[0] == 200
    for base in (PLAIN, PLAIN + "/agents/local." + "0" * 64, ROUTER[:-1] + ("0" if ROUTER[-1] != "0" else "1")):
        status, body, _ = ask("/execute", "POST", b'{"command": "id"}', base, Content_Type="application/json", **here(sandbox))
        assert status == 401 and json.loads(body)["detail"], (base, status, body)
    key = {"Authorization": "Bearer " + os.environ["AGENT_SANDBOX_KEY"]}
    assert ask("/", base=PLAIN, **here(sandbox), **key)[0] == 200


def test_another_tenant_finds_nothing(sandbox):
    key = {"Authorization": "Bearer " + os.environ["AGENT_SANDBOX_FOREIGN_KEY"]}
    status, body, _ = ask("/execute", "POST", b'{"command": "id"}', PLAIN, **here(sandbox), **key)
    assert status == 404 and "there is no sandbox" in json.loads(body)["detail"]


@pytest.mark.parametrize(("header", "value"), [
    ("X-Sandbox-ID", "../etc"), ("X-Sandbox-ID", "A"), ("X-Sandbox-ID", "a" * 64), ("X-Sandbox-ID", ""),
    ("X-Sandbox-Namespace", "no_such"), ("X-Sandbox-Port", "0"), ("X-Sandbox-Port", "65536"), ("X-Sandbox-Port", "http"),
])
def test_headers_that_are_wrong(sandbox, header, value):
    status, body, _ = ask("/", **{**here(sandbox), header.replace("-", "_"): value})
    assert status == 400 and json.loads(body)["detail"]


def test_a_sandbox_that_there_is_not(sandbox):
    status, body, _ = ask("/", **{**here(sandbox), "X_Sandbox_ID": "no-such-sandbox"})
    assert status == 404 and "no-such-sandbox" in json.loads(body)["detail"]


def test_where_a_sandbox_is_is_not_for_the_client_to_say(sandbox):
    assert ask("/", **here(sandbox, X_Sandbox_Pod_IP="169.254.169.254"))[0] == 200


def upload(sandbox, filename, content=b"x"):
    body = b"--B\r\nContent-Disposition: form-data; name=\"file\"; filename=\"" + filename + b"\"\r\n\r\n" + content + b"\r\n--B--\r\n"
    return ask("/upload", "POST", body, Content_Type="multipart/form-data; boundary=B", **here(sandbox))


@pytest.mark.parametrize(("filename", "place"), [
    (b"../x", "/x"), (b"%2e%2e/x", "/app/%2e%2e/x"), ("ü \\ ☃".encode(), "/app/ü \\ ☃"), (b"a%22b", '/app/a"b'), (b"/tmp/./y/../x", "/tmp/x"),
])
def test_uploads_of_all_kinds_of_names(sandbox, filename, place):
    status, body, _ = upload(sandbox, filename, b"content")
    if place == "/x":  # the root is not the user's
        assert status == 403 and json.loads(body)["detail"]
        return
    assert status == 200, body
    assert sandbox.commands.run("cat '" + place + "'").stdout == "content"
    sandbox.commands.run("rm '" + place + "'")


@pytest.mark.parametrize("filename", [b"", b"dir/", b"a\x00b", b"n" * 300, b"p/" * 3000 + b"x", b"/etc/passwd", b"/proc/self/mem"])
def test_uploads_that_cannot_be(sandbox, filename):
    status, body, _ = upload(sandbox, filename)
    assert 400 <= status < 500 and json.loads(body)["detail"], (status, body)


@pytest.mark.parametrize(("path", "status"), [
    ("/exists/%2Fetc%2Fpasswd", 200), ("/exists//etc/passwd", 200), ("/download/..%2F..%2Fetc%2Fshadow", 403), ("/download/%2e%2e/nothing", 404),
    ("/download/a%00b", 400), ("/nothing", 404), ("/agent", 404), ("/list/%2Fetc%2Fpasswd", 404), ("/execute", 405),
])
def test_paths(sandbox, path, status):
    got = ask(path, **here(sandbox))
    assert got[0] == status, got


def test_another_port_of_the_sandbox(sandbox):
    sandbox.commands.run("mkdir -p www && echo 'from the sandbox' > www/index.html && (cd www && nohup python3 -m http.server 8123 >/dev/null 2>&1 &)")
    status, body, headers = 0, b"", {}
    for _ in range(20):
        status, body, headers = ask("/index.html", **here(sandbox, X_Sandbox_Port="8123"))
        if status == 200:
            break
    assert (status, body) == (200, b"from the sandbox\n")
    assert "sandbox" in headers["Content-Security-Policy"]
    sandbox.commands.run("pkill -f 'http.server 812[3]'")


def test_a_port_that_nobody_listens_on(sandbox):
    status, body, _ = ask("/", **here(sandbox, X_Sandbox_Port="8124"))
    assert status == 502 and "8124" in json.loads(body)["detail"]


def kubectl(*args, config="KUBECONFIG", **options):
    return subprocess.run(["kubectl", *args], capture_output=True, text=True, timeout=600, env={**os.environ, "KUBECONFIG": os.environ[config]}, **options)


def test_kubectl_lists_what_there_is(sandbox):
    got = kubectl("get", "sandboxes,sandboxclaims", "-n", NAMESPACE)
    assert got.returncode == 0, got.stderr
    assert f"sandboxclaim.extensions.agents.x-k8s.io/{sandbox.claim_name}" in got.stdout
    assert f"sandbox.agents.x-k8s.io/{sandbox.sandbox_id}" in got.stdout


def test_kubectl_of_another_tenant_sees_none_of_it(sandbox):
    got = kubectl("get", "sandboxes,sandboxclaims", "-A", config="AGENT_SANDBOX_FOREIGN_KUBECONFIG")
    assert got.returncode == 0 and sandbox.claim_name not in got.stdout, got
    got = kubectl("delete", "sandboxclaim", sandbox.claim_name, "-n", NAMESPACE, config="AGENT_SANDBOX_FOREIGN_KUBECONFIG")
    assert got.returncode != 0 and "not found" in got.stderr.lower()
    assert sandbox.commands.run("echo alive").stdout == "alive\n"


def test_kubectl_forwards_a_port_of_a_sandbox(sandbox):
    sandbox.commands.run("mkdir -p www && echo forwarded > www/index.html && (cd www && nohup python3 -m http.server 8125 >/dev/null 2>&1 &)")
    forward = subprocess.Popen(["kubectl", "port-forward", f"pod/{sandbox.sandbox_id}", ":8125", "-n", NAMESPACE], stdout=subprocess.PIPE, text=True)
    try:
        port = int(forward.stdout.readline().split("->")[0].rsplit(":", 1)[1])
        assert ask("/index.html", base=f"http://127.0.0.1:{port}")[:2] == (200, b"forwarded\n")
    finally:
        forward.terminate()
        forward.wait(10)
        sandbox.commands.run("pkill -f 'http.server 812[5]'")
