"""What the SDKs do not let a program send, and the very bytes of answers that they depend on."""

import json

import pytest

from conftest import IMAGE

GOOD = {"image": {"uri": IMAGE}, "resourceLimits": {"cpu": "1", "memory": "512Mi"}, "entrypoint": ["tail", "-f", "/dev/null"], "timeout": 120}


def explained(answer, status):
    """Every refusal has a code and a sentence, and tells nothing of the inside."""
    assert answer.status_code in (status if isinstance(status, tuple) else (status,)), answer.text
    body = answer.json()
    assert set(body) >= {"code", "message"} and body["code"] and len(body["message"]) > 5, body
    for inside in ("goroutine", ".go:", "panic", "/var/lib", "sql:"):
        assert inside not in body["message"]
    assert answer.headers["x-request-id"]
    return body


@pytest.mark.parametrize(
    ("change", "status", "code"),
    [
        ({"image": None}, 400, ""),
        ({"image": {}}, 400, ""),
        ({"image": {"uri": ""}}, 400, ""),
        ({"image": {"uri": "x" * 5000}}, 400, ""),
        ({"image": {"uri": "../../etc/passwd"}}, (400, 404), ""),
        ({"image": {"uri": "file:///etc/passwd"}}, (400, 404), ""),
        ({"snapshotId": "both"}, 400, ""),
        ({"image": None, "snapshotId": "none"}, 404, "SNAPSHOT::NOT_FOUND"),
        ({"resourceLimits": {"cpu": "-1"}}, 400, ""),
        ({"resourceLimits": {"cpu": "1000000"}}, 400, ""),
        ({"resourceLimits": {"memory": "1Ki"}}, 400, ""),
        ({"resourceLimits": {"memory": "9999Ti"}}, 400, ""),
        ({"resourceLimits": {"memory": "12 parsecs"}}, 400, ""),
        ({"resourceLimits": {"cpu": 1}}, 400, ""),
        ({"resourceLimits": "much"}, 400, ""),
        ({"timeout": -5}, 400, ""),
        ({"timeout": "soon"}, 400, ""),
        ({"timeout": 10**18}, 400, ""),
        ({"entrypoint": []}, 400, "DOCKER::INVALID_ENTRYPOINT"),
        ({"entrypoint": "sleep"}, 400, ""),
        ({"env": {"A=B": "c"}}, 400, ""),
        ({"env": {"": "c"}}, 400, ""),
        ({"env": {"A": "x" * (1 << 20)}}, (400, 413), ""),
        ({"metadata": {"bad key!": "v"}}, 400, "SANDBOX::INVALID_METADATA_LABEL"),
        ({"metadata": {"k": "v" * 64}}, 400, "SANDBOX::INVALID_METADATA_LABEL"),
        ({"metadata": {"opensandbox.io/id": "v"}}, 400, "SANDBOX::INVALID_METADATA_LABEL"),
        ({"platform": {"os": "plan9", "arch": "amd64"}}, 400, ""),
        ({"networkPolicy": {"defaultAction": "maybe"}}, 400, ""),
        ({"networkPolicy": {"egress": [{"action": "allow", "target": "10.0.0.0/99"}]}}, 400, ""),
        ({"volumes": [{"name": "a", "mountPath": "/x"}]}, 400, "VOLUME::"),
        ({"volumes": [{"name": "a", "mountPath": "x", "pvc": {"claimName": "c"}}]}, 400, "VOLUME::INVALID_MOUNT_PATH"),
        ({"volumes": [{"name": "a", "mountPath": "/x", "pvc": {"claimName": "c"}, "host": {"path": "/etc"}}]}, 400, "VOLUME::INVALID_BACKEND"),
        ({"extensions": {"access.renew.extend.seconds": "a lot"}}, 400, ""),
        ({"extensions": {"poolRef": "p"}}, (400, 501), "SANDBOX::UNSUPPORTED_POOL_REF"),
    ],
    ids=lambda v: json.dumps(v)[:60] if isinstance(v, dict) else "",
)
def test_a_create_that_cannot_be_granted(wire, change, status, code, tag):
    body = {k: v for k, v in {**GOOD, "metadata": {"run": tag}, **change}.items() if v is not None}
    answer = wire.api("POST", "/sandboxes", json=body)
    if answer.status_code == 202:
        wire.api("DELETE", "/sandboxes/" + answer.json()["id"])
    assert explained(answer, status)["code"].startswith(code)
    assert wire.made(tag) == 0


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b"null", b"\xff\xfe", b'{"image":' * 5000, b"{}" + b" " * (2 << 20) + b"x"], ids=range(8))
def test_a_body_that_is_none(wire, body):
    explained(wire.api("POST", "/sandboxes", content=body, headers={"Content-Type": "application/json"}), (400, 413))


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "", None), ("DELETE", "", None), ("POST", "/pause", None), ("POST", "/resume", None), ("PATCH", "/metadata", {"a": "b"}),
        ("POST", "/renew-expiration", {"expiresAt": "2100-01-01T00:00:00Z"}), ("GET", "/endpoints/44772", None), ("POST", "/snapshots", {}),
        ("GET", "/diagnostics/logs?scope=all", None), ("GET", "/diagnostics/events?scope=all", None), ("GET", "/diagnostics/summary", None),
        ("GET", "/proxy/44772/ping", None), ("POST", "/proxy/44772/command", {"command": "true"}), ("GET", "/proxy/18080/policy", None), ("GET", "/proxy/8000/", None),
    ],
)
@pytest.mark.parametrize("unknown", ["none", "00000000-0000-0000-0000-000000000000", "%2e%2e", "a" * 300])
def test_an_unknown_sandbox_is_not_found(wire, method, path, body, unknown):
    explained(wire.api(method, f"/sandboxes/{unknown}{path}", json=body), 404)


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/endpoints/0", None, 400), ("GET", "/endpoints/65536", None, 400), ("GET", "/endpoints/http", None, 400),
        ("GET", "/endpoints/8000?expires=1", None, 400), ("GET", "/endpoints/8000?expires=later", None, 400),
        ("POST", "/renew-expiration", {"expiresAt": "yesterday"}, 400), ("POST", "/renew-expiration", {"expiresAt": "2001-01-01T00:00:00Z"}, 400), ("POST", "/renew-expiration", {}, 400),
        ("PATCH", "/metadata", ["a"], 400), ("PATCH", "/metadata", {"a": 1}, 400), ("POST", "/resume", None, 409), ("POST", "/snapshots", {"name": 1}, 400),
        ("PUT", "/pause", None, (404, 405)), ("GET", "/nonsense", None, 404), ("GET", "/diagnostics/logs?tail=x", None, 400),
    ],
)
def test_a_request_that_makes_no_sense(wire, sandbox, method, path, body, status):
    explained(wire.api(method, f"/sandboxes/{sandbox.id}{path}", json=body), status)


@pytest.mark.parametrize("query", ["page=0", "pageSize=0", "pageSize=201", "page=x", "metadata=a", "metadata=%3D"])
def test_a_list_that_makes_no_sense(wire, query):
    explained(wire.api("GET", "/sandboxes?" + query), 400)


@pytest.mark.parametrize(
    ("method", "path", "kw", "status"),
    [
        ("POST", "/command", {"content": b"{"}, 400),
        ("POST", "/command", {"json": {}}, 400),
        ("POST", "/command", {"json": {"command": "true", "gid": 1}}, 400),
        ("POST", "/command", {"json": {"command": "true", "uid": -1}}, 400),
        ("POST", "/command", {"json": {"command": "true", "timeout": "x"}}, 400),
        ("POST", "/command", {"json": {"command": "true", "cwd": "/none"}}, 400),
        ("POST", "/command", {"json": {"command": "a\0b"}}, 400),
        ("DELETE", "/command", {}, 400),
        ("DELETE", "/command?id=none", {}, 400),
        ("GET", "/command/status/none", {}, 404),
        ("GET", "/command/none/logs", {}, (400, 404)),
        ("POST", "/session/none/run", {"json": {"command": "true"}}, 404),
        ("DELETE", "/session/none", {}, 404),
        ("POST", "/code", {"content": b"["}, 400),
        ("POST", "/code", {"json": {"code": "1", "context": {"id": "none", "language": "python"}}}, (200, 404)),
        ("DELETE", "/code?id=none", {}, 400),
        ("GET", "/code/contexts/none", {}, 404),
        ("DELETE", "/code/contexts/none", {}, 404),
        ("POST", "/code/context", {"json": {"language": "klingon"}}, 400),
        ("GET", "/files/info", {}, 400),
        ("GET", "/files/info?path=/none", {}, 404),
        ("GET", "/files/download", {}, 400),
        ("GET", "/files/download?path=/", {}, 400),
        ("GET", "/files/download?path=/none", {}, 404),
        ("POST", "/files/upload", {"content": b"no multipart"}, 400),
        ("POST", "/files/upload", {"files": {"file": ("a", b"x")}}, 400),
        ("POST", "/files/upload", {"files": {"metadata": ("metadata", b"{")}}, 400),
        ("POST", "/files/mv", {"json": {}}, 400),
        ("POST", "/files/permissions", {"json": {"/none": {"mode": 644}}}, 400),
        ("POST", "/files/permissions", {"json": {"/tmp": {"mode": 999}}}, 400),
        ("POST", "/files/replace", {"json": {"/tmp/x": {"old": "", "new": "x"}}}, 400),
        ("GET", "/files/search", {}, 400),
        ("GET", "/directories/list?path=/none", {}, 404),
        ("POST", "/pty", {"content": b"{"}, 400),
        ("GET", "/pty/none", {}, 404),
        ("DELETE", "/pty/none", {}, 404),
        ("GET", "/nonsense", {}, 404),
    ],
    ids=lambda v: str(v)[:50],
)
def test_what_execd_refuses(wire, sandbox, method, path, kw, status):
    answer = wire.at(sandbox.get_endpoint(44772), method, path, **kw)
    if answer.status_code == 200:
        assert '"code"' in answer.text or '"error"' in answer.text
    else:
        explained(answer, status)


def test_a_stream_is_what_the_clients_parse(wire, sandbox):
    answer = wire.at(sandbox.get_endpoint(44772), "POST", "/command", json={"command": "echo a; echo b >&2; exit 2"})
    assert answer.status_code == 200
    assert answer.headers["content-type"].split(";")[0] == "text/event-stream"
    frames = answer.text.removesuffix("\n\n").split("\n\n")
    events = [json.loads(f.removeprefix("data: ")) for f in frames]
    kinds = [e["type"] for e in events if e["type"] != "ping"]
    assert kinds[0] == "init" and kinds[-1] == "error" and sorted(kinds[1:-1]) == ["stderr", "stdout"]
    assert all(isinstance(e["timestamp"], int) for e in events)
    assert events[-1]["error"]["ename"] == "CommandExecError" and events[-1]["error"]["evalue"] == "2"


def test_an_empty_success_says_that_it_is_empty(wire, sandbox):
    """The JavaScript SDK parses an empty answer as JSON unless its length is told."""
    endpoint = sandbox.get_endpoint(44772)
    for method, path, kw in (("GET", "/ping", {}), ("POST", "/directories", {"json": {"/tmp/empty": {"mode": 755}}}), ("DELETE", "/directories?path=/tmp/empty", {})):
        answer = wire.at(endpoint, method, path, **kw)
        assert answer.status_code == 200 and answer.content == b""
        assert answer.headers["content-length"] == "0"


def test_there_are_no_nulls(wire, sandbox):
    for path in (f"/sandboxes/{sandbox.id}", "/sandboxes", "/snapshots", f"/sandboxes/{sandbox.id}/endpoints/44772"):
        assert ":null" not in wire.api("GET", path).text.replace(" ", "")


def test_other_ways_to_give_the_key_and_paths_without_a_version(wire, sandbox):
    assert wire.client.get(f"{wire.url}/v1/sandboxes/{sandbox.id}", headers={"X-API-Key": wire.key}).status_code == 200
    endpoint = sandbox.get_endpoint(44772)
    for prefix in ("", "/v1"):
        assert wire.client.get(f"{wire.url}{prefix}/sandboxes/{sandbox.id}/proxy/44772/ping", headers=endpoint.headers).status_code == 200
    assert wire.client.get(f"{wire.url}/health").status_code == 200
    assert wire.api("POST", "/metrics/events", json={"eventType": "sandbox.create"}).status_code == 204


def test_pools_are_refused_with_a_sentence(wire):
    for method, path in (("GET", "/pools"), ("POST", "/pools"), ("GET", "/pools/p"), ("PUT", "/pools/p"), ("DELETE", "/pools/p")):
        explained(wire.api(method, path, json={} if method in ("POST", "PUT") else None), 501)


def test_the_watch_of_metrics_streams(wire, sandbox):
    endpoint = sandbox.get_endpoint(44772)
    with wire.client.stream("GET", f"http://{endpoint.endpoint}/metrics/watch", headers=endpoint.headers) as stream:
        lines = stream.iter_lines()
        seen = [json.loads(line.removeprefix("data: ")) for line in (next(line for line in lines if line.strip()) for _ in range(2))]
    assert seen[1]["timestamp"] > seen[0]["timestamp"]


def test_the_legacy_diagnostics_are_text(wire, sandbox):
    for path in ("logs", "events", "inspect", "summary"):
        answer = wire.api("GET", f"/sandboxes/{sandbox.id}/diagnostics/{path}")
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain")
