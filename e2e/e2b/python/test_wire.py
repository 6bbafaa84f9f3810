"""The wire itself, where the newest SDKs do not go: older paths, exact bodies, bad input, other doors."""

import base64
import json
import time

import pytest
from conftest import eventually

UNKNOWN = "nonexistingsandbox"


@pytest.fixture
def v1(wire):
    """Creates by the older call, as SDKs before 2.50 and the CLI do."""
    made = []

    def create(**body):
        got = wire.api("POST", "/sandboxes", json={"templateID": "base", "timeout": 600, **body})
        assert got.status_code == 201, got.text
        made.append(got.json()["sandboxID"])
        return got.json()

    yield create
    for sandbox_id in made:
        wire.api("DELETE", f"/sandboxes/{sandbox_id}")


@pytest.mark.proves("POST /sandboxes")
def test_the_older_create(v1, wire):
    made = v1(secure=True, metadata={"a": "b"})
    assert {"templateID", "sandboxID", "clientID", "envdVersion", "envdAccessToken"} <= made.keys()
    assert made["alias"] == "base"
    stat = {"path": "/etc/hostname"}
    path = "/filesystem.Filesystem/Stat"
    for made in (made, v1(), v1(secure=False)):
        refused = wire.data("POST", made["sandboxID"], 49983, path, json=stat)
        assert refused.status_code == 401 and refused.json()["code"] in (401, "unauthenticated")
        token = {"X-Access-Token": made["envdAccessToken"]}
        assert wire.data("POST", made["sandboxID"], 49983, path, token, json=stat).status_code == 200


@pytest.mark.proves("GET /sandboxes/{id}")
def test_details_have_every_field(v1, wire):
    made = v1(secure=True)
    got = wire.api("GET", f"/sandboxes/{made['sandboxID']}")
    assert got.status_code == 200 and got.headers["content-type"].startswith("application/json")
    want = "templateID sandboxID clientID startedAt endAt envdVersion cpuCount memoryMB diskSizeMB state"
    assert set(want.split()) <= got.json().keys()
    assert wire.api("GET", f"/sandboxes/{made['sandboxID']}-{made['clientID']}").status_code == 200


@pytest.mark.proves("GET /v2/sandboxes", "GET /sandboxes")
def test_lists(v1, wire, tag):
    v1(metadata={"id": tag})
    got = wire.api("GET", "/v2/sandboxes", params={"metadata": f"id={tag}", "limit": 1})
    assert len(got.json()) == 1 and int(got.headers["x-total-running"]) >= 1
    assert not got.headers.get("x-next-token")
    assert len(wire.api("GET", "/sandboxes", params={"metadata": f"id={tag}"}).json()) == 1
    for bad in ({"limit": 0}, {"limit": 101}, {"state": "asleep"}, {"order": "up"}, {"nextToken": "garbage"}, {"startedAfter": "soon"}, {"template": "base:tag"}):
        refused = wire.api("GET", "/v2/sandboxes", params=bad)
        assert refused.status_code == 400 and refused.json()["code"] == 400, bad


@pytest.mark.proves("POST /sandboxes/{id}/refreshes")
def test_a_refresh_only_lengthens(v1, wire):
    sandbox_id = v1(timeout=600)["sandboxID"]

    def end():
        return wire.api("GET", f"/sandboxes/{sandbox_id}").json()["endAt"]

    before = end()
    assert wire.api("POST", f"/sandboxes/{sandbox_id}/refreshes", json={"duration": 100}).status_code == 204
    assert end() == before
    assert wire.api("POST", f"/sandboxes/{sandbox_id}/refreshes", json={"duration": 3000}).status_code == 204
    assert end() > before
    assert wire.api("POST", f"/sandboxes/{sandbox_id}/refreshes", json={"duration": 3601}).status_code == 400


@pytest.mark.proves("POST /sandboxes/{id}/pause", "POST /sandboxes/{id}/resume", "POST /sandboxes/{id}/connect")
def test_pause_resume_connect(v1, wire):
    sandbox_id = v1()["sandboxID"]
    at = f"/sandboxes/{sandbox_id}"
    assert wire.api("POST", f"{at}/resume", json={"timeout": 600}).status_code == 409
    assert wire.api("POST", f"{at}/connect", json={"timeout": 600}).status_code == 200
    assert wire.api("POST", f"{at}/pause").status_code == 204
    assert wire.api("POST", f"{at}/pause", json={}).status_code == 409
    assert wire.api("POST", f"{at}/resume", json={"timeout": 600}).status_code == 201
    assert wire.api("POST", f"{at}/pause", json={"memory": True}).status_code == 204
    assert wire.api("POST", f"{at}/connect", json={"timeout": 600}).status_code == 201


@pytest.mark.proves("GET /sandboxes/{id}/logs", "GET /v2/sandboxes/{id}/logs")
def test_logs_of_both_kinds(make, wire):
    sbx = make()
    sbx.commands.run("echo logged")

    def lines():
        got = wire.api("GET", f"/sandboxes/{sbx.sandbox_id}/logs")
        assert got.status_code == 200 and set(got.json()) >= {"logs", "logEntries"}
        return got.json()["logs"]

    assert {"timestamp", "line"} <= eventually(lines)[0].keys()
    got = wire.api("GET", f"/v2/sandboxes/{sbx.sandbox_id}/logs", params={"direction": "backward", "limit": 5})
    entry = got.json()["logs"][0]
    assert {"timestamp", "message", "level", "fields"} <= entry.keys()
    assert wire.api("GET", f"/sandboxes/{UNKNOWN}/logs").status_code == 404


@pytest.mark.proves("GET /sandboxes/metrics")
def test_the_latest_metrics_of_many(make, wire):
    sbx = make()
    got = eventually(lambda: wire.api("GET", "/sandboxes/metrics", params={"sandbox_ids": sbx.sandbox_id}).json()["sandboxes"])
    want = "timestamp timestampUnix cpuCount cpuUsedPct memUsed memTotal memCache diskUsed diskTotal"
    assert set(want.split()) <= got[sbx.sandbox_id].keys()


@pytest.mark.parametrize(
    "method, path, body",
    [
        ("GET", "", None),
        ("DELETE", "", None),
        ("POST", "/timeout", {"timeout": 5}),
        ("POST", "/refreshes", {"duration": 5}),
        ("POST", "/pause", {}),
        ("POST", "/resume", {"timeout": 5}),
        ("POST", "/connect", {"timeout": 5}),
        ("POST", "/fork", {}),
        ("POST", "/snapshots", {}),
        ("PUT", "/network", {}),
        ("GET", "/metrics", None),
        ("GET", "/logs", None),
    ],
)
@pytest.mark.proves("errors: unknown sandbox")
def test_an_unknown_sandbox_is_404_everywhere(wire, method, path, body):
    got = wire.api(method, f"/sandboxes/{UNKNOWN}{path}", json=body)
    assert got.status_code == 404
    assert got.json()["code"] == 404 and got.json()["message"]


@pytest.mark.parametrize("path", ["/v2/sandboxes", "/sandboxes/abc", "/templates", "/snapshots", "/teams"])
@pytest.mark.proves("errors: wrong key")
def test_S0_3_a_wrong_or_missing_key_is_401_everywhere(wire, path):
    for key in ("e2b_" + "0" * 40, "", "not a key"):
        got = wire.api("GET", path, key=key)
        assert got.status_code == 401 and got.json()["code"] == 401


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'"x"', b"{}", b'{"templateID": 5}', b'{"templateID": "base", "timeout": "soon"}', b'{"templateID": "base", "metadata": {"a": 1}}', b'{"templateID": "base", "timeout": 1e400}', b"\xff\xfe"],
)
@pytest.mark.proves("errors: bad body")
def test_a_malformed_create_is_400(wire, body):
    for path in ("/sandboxes", "/v2/sandboxes"):
        got = wire.api("POST", path, content=body, headers={"Content-Type": "application/json"})
        assert got.status_code == 400, (path, got.text)
        assert got.json()["code"] == 400 and got.json()["message"]


@pytest.mark.proves("errors: bad body")
def test_what_is_too_large_is_refused(wire):
    body = b'{"templateID": "base", "metadata": {"a": "' + b"x" * 20_000_000 + b'"}}'
    got = wire.api("POST", "/v2/sandboxes", content=body, headers={"Content-Type": "application/json"})
    assert got.status_code in (400, 413) and got.json()["code"] == got.status_code


@pytest.mark.parametrize("bad", ["..%2f..%2fetc", "UPPER", "a b", "x" * 500, "%00"])
@pytest.mark.proves("errors: malformed id")
def test_a_malformed_id_is_refused(wire, bad):
    assert wire.api("GET", f"/sandboxes/{bad}").status_code in (400, 404)


@pytest.mark.parametrize("body", [{"volumeMounts": [{"name": "v", "path": "/v"}]}, {"iam": {"tokens": {"a": {"audience": "x", "tokenType": "JWT-SVID"}}}}])
@pytest.mark.proves("errors: what is not there yet")
def test_what_is_not_there_yet_is_said_and_not_ignored(wire, body):
    got = wire.api("POST", "/v2/sandboxes", json={"templateID": "base", "timeout": 600, **body})
    assert got.status_code in (400, 501) and got.json()["message"]


@pytest.mark.parametrize("method, path", [("GET", "/volumes"), ("POST", "/volumes"), ("GET", "/secrets"), ("POST", "/secrets")])
@pytest.mark.proves("errors: what is not there yet")
def test_volumes_and_secrets_have_a_clear_error(wire, method, path):
    got = wire.api(method, path, json={"name": "x", "value": "y"} if method == "POST" else None)
    assert got.status_code in (400, 404, 501) and len(got.json()["message"]) > 10


@pytest.mark.parametrize("path", ["/init", "/freeze", "/unfreeze", "/collapse", "/fsfreeze", "/fsthaw", "/upgrade"])
@pytest.mark.proves("envd: internal paths")
def test_what_is_envds_own_is_not_for_outside(make, wire, path):
    sbx = make()
    token = {"X-Access-Token": sbx._envd_access_token}
    assert wire.data("POST", sbx.sandbox_id, 49983, path, token, json={}).status_code == 404


@pytest.mark.proves("envd: GET /health", "envd: GET /metrics", "envd: GET /envs")
def test_envds_small_answers(make, wire):
    sbx = make(envs={"A": "b"})
    token = {"X-Access-Token": sbx._envd_access_token}
    assert wire.data("GET", sbx.sandbox_id, 49983, "/health").status_code == 204
    metrics = wire.data("GET", sbx.sandbox_id, 49983, "/metrics", token)
    assert metrics.status_code == 200 and {"ts", "cpu_count", "mem_total", "disk_total"} <= metrics.json().keys()
    assert wire.data("GET", sbx.sandbox_id, 49983, "/envs", token).json()["A"] == "b"
    assert wire.data("GET", sbx.sandbox_id, 49983, "/envs").status_code == 401
    assert wire.data("GET", sbx.sandbox_id, 49999, "/health").json() == "OK"


@pytest.mark.proves("envd: POST /files")
def test_uploads_that_are_broken_are_refused(make, wire):
    sbx = make()
    token = {"X-Access-Token": sbx._envd_access_token}
    multipart = {**token, "Content-Type": "multipart/form-data; boundary=b"}
    cut = b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\nhalf'
    got = wire.data("POST", sbx.sandbox_id, 49983, "/files?path=/tmp/cut", multipart, content=cut)
    assert got.status_code == 400 and got.json()["code"] == 400
    twice = [("file", ("/tmp/same", b"1")), ("file", ("/tmp/same", b"2"))]
    got = wire.data("POST", sbx.sandbox_id, 49983, "/files", token, files=twice)
    assert got.status_code == 400
    octets = {**token, "Content-Type": "application/octet-stream"}
    assert wire.data("POST", sbx.sandbox_id, 49983, "/files", octets, content=b"x").status_code == 400
    gz = {**octets, "Content-Encoding": "gzip"}
    assert wire.data("POST", sbx.sandbox_id, 49983, "/files?path=/tmp/gz", gz, content=b"not gzip").status_code == 400


@pytest.mark.proves("envd: GET /files")
def test_downloads_in_part(make, wire):
    sbx = make()
    sbx.files.write("/tmp/part", "0123456789")
    headers = {"X-Access-Token": sbx._envd_access_token, "Range": "bytes=2-4"}
    got = wire.data("GET", sbx.sandbox_id, 49983, "/files?path=/tmp/part", headers)
    assert (got.status_code, got.text) == (206, "234")


@pytest.mark.parametrize("frame", [b"", b"\x00", b"\x00\x00\x00\x00\x05{", b"\x00\xff\xff\xff\xff{}", b"\x01\x00\x00\x00\x02{}", b"\x00\x00\x00\x00\x02xx"])
@pytest.mark.proves("envd: malformed frames")
def test_a_malformed_frame_is_an_answer_not_a_hang(make, wire, frame):
    sbx = make()
    headers = {"X-Access-Token": sbx._envd_access_token, "Content-Type": "application/connect+json", "Connect-Protocol-Version": "1"}
    got = wire.data("POST", sbx.sandbox_id, 49983, "/process.Process/Start", headers, content=frame)
    assert got.status_code in (200, 400, 415) and b"error" in got.content or got.status_code >= 400


@pytest.mark.proves("envd: path traversal")
def test_paths_never_leave_the_sandbox(make, wire):
    sbx = make()
    for path in ("../../../../etc/shadow", "/proc/1/root/etc/shadow", "/../../etc/hostname"):
        assert "root:$" not in sbx.commands.run(f"cat {path} 2>&1 || true").stdout
    token = {"X-Access-Token": sbx._envd_access_token}
    inside = wire.data("GET", sbx.sandbox_id, 49983, "/files?path=../../../../etc/hostname", token)
    assert inside.text == sbx.files.read("/etc/hostname")


@pytest.mark.proves("interpreter: POST /execute")
def test_an_execution_is_lines_of_json(make_code, wire):
    sbx = make_code()
    token = {"X-Access-Token": sbx._envd_access_token}
    assert wire.data("POST", sbx.sandbox_id, 49999, "/execute", json={"code": "1"}).status_code == 401
    got = wire.data("POST", sbx.sandbox_id, 49999, "/execute", token, json={"code": "print('ü'); 'x'"})
    assert got.status_code == 200 and got.text.isascii()
    events = [json.loads(line) for line in got.text.splitlines()]
    assert {e["type"] for e in events} >= {"number_of_executions", "stdout", "result"}
    assert events[-1]["type"] == "end_of_execution"
    both = wire.data("POST", sbx.sandbox_id, 49999, "/execute", token, json={"code": "1", "context_id": "x", "language": "python"})
    assert both.status_code == 400
    for bad in (b"", b"{", b"[]", b"{}"):
        assert wire.data("POST", sbx.sandbox_id, 49999, "/execute", token, content=bad).status_code in (400, 422)
    missing = wire.data("DELETE", sbx.sandbox_id, 49999, "/contexts/nope")
    assert missing.status_code == 404 and "nope" in missing.text


@pytest.mark.proves("kruise aliases")
def test_openkruises_private_paths(make, wire):
    sbx = make()
    got = wire.client.get(f"{wire.url}/kruise/api/sandboxes/{sbx.sandbox_id}", headers={"X-API-Key": wire.key})
    assert got.status_code == 200 and got.json()["sandboxID"] == sbx.sandbox_id
    health = wire.client.get(f"{wire.url}/kruise/{sbx.sandbox_id}/49983/health")
    assert health.status_code == 204


@pytest.mark.proves("binary protobuf")
def test_binary_protobuf_is_spoken_too(make, wire):
    sbx = make()
    headers = {"X-Access-Token": sbx._envd_access_token, "Content-Type": "application/proto", "Connect-Protocol-Version": "1"}
    path = b"/etc/hostname"
    got = wire.data("POST", sbx.sandbox_id, 49983, "/filesystem.Filesystem/Stat", headers, content=b"\x0a" + bytes([len(path)]) + path)
    assert got.status_code == 200 and path in got.content


@pytest.mark.proves("users by Basic authentication")
def test_a_user_is_named_by_basic_authentication(make, wire):
    sbx = make()
    headers = {"X-Access-Token": sbx._envd_access_token, "Authorization": "Basic " + base64.b64encode(b"root:").decode()}
    got = wire.data("POST", sbx.sandbox_id, 49983, "/filesystem.Filesystem/Stat", headers, json={"path": "~"})
    assert got.json()["entry"]["path"] == "/root"


@pytest.mark.proves("GET /health", "GET /teams", "GET /templates")
def test_the_rest_of_the_control_plane(wire):
    assert wire.client.get(f"{wire.url}/health").status_code in (200, 204)
    team = wire.api("GET", "/teams").json()[0]
    assert {"teamID", "name", "apiKey", "isDefault"} <= team.keys()
    templates = wire.api("GET", "/templates").json()
    assert isinstance(templates, list)
    names = {name for t in templates for name in t["names"] + t["aliases"]}
    assert {"base", "code-interpreter-v1"} <= names or templates == []


@pytest.mark.proves("POST /sandboxes/{id}/timeout")
def test_a_timeout_of_zero_is_now(v1, wire):
    sandbox_id = v1()["sandboxID"]
    assert wire.api("POST", f"/sandboxes/{sandbox_id}/timeout", json={"timeout": 0}).status_code == 204
    begun = time.monotonic()
    eventually(lambda: wire.api("GET", f"/sandboxes/{sandbox_id}").status_code == 404)
    assert time.monotonic() - begun < 50  # not at the end of the time that it had before
