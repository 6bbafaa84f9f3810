"""File URLs that work without any header."""

import httpx
import pytest
from conftest import eventually


@pytest.mark.proves("Sandbox.download_url")
def test_a_signed_url_downloads(sandbox, folder):
    sandbox.files.write(f"{folder}/f ü.txt", "to fetch")
    got = httpx.get(sandbox.download_url(f"{folder}/f ü.txt"))
    assert (got.status_code, got.text) == (200, "to fetch")
    assert "attachment" in got.headers["content-disposition"] or "filename" in got.headers["content-disposition"]
    as_root = httpx.get(sandbox.download_url("/etc/shadow", user="root"))
    assert as_root.status_code == 200


@pytest.mark.proves("Sandbox.upload_url")
def test_a_signed_url_uploads(sandbox, folder):
    url = sandbox.upload_url(f"{folder}/up.txt")
    put = httpx.post(url, files={"file": ("whatever.bin", b"sent")})
    assert put.status_code == 200
    assert put.json() == [{"name": "up.txt", "path": f"{folder}/up.txt", "type": "file"}]
    assert sandbox.files.read(f"{folder}/up.txt") == "sent"


@pytest.mark.proves("Sandbox.download_url", "Sandbox.upload_url")
def test_a_url_may_expire(sandbox, folder):
    sandbox.files.write(f"{folder}/f", "x")
    url = sandbox.download_url(f"{folder}/f", use_signature_expiration=20)
    assert httpx.get(url).status_code == 200
    lasting = sandbox.upload_url(f"{folder}/g", use_signature_expiration=600)
    assert httpx.post(lasting, files={"file": b"y"}).status_code == 200
    late = eventually(lambda: (got := httpx.get(url, timeout=120)).status_code == 401 and got, every=1)
    assert late.json() == {"code": 401, "message": "signature is already expired"}


@pytest.mark.proves("Sandbox.download_url")
def test_a_signature_is_for_one_path_one_operation_and_one_sandbox(sandbox, make, folder, wire):
    sandbox.files.write(f"{folder}/f", "x")
    url = sandbox.download_url(f"{folder}/f")
    assert httpx.get(url.replace("signature=v1_", "signature=v1_A")).status_code in (401, 404, 502)
    assert httpx.post(url, files={"file": b"y"}).status_code in (401, 404, 502)
    other = make()
    query = url.split("?", 1)[1]
    crossed = wire.data("GET", other.sandbox_id, 49983, f"/files?{query}")
    assert crossed.status_code == 401
    assert crossed.json() == {"code": 401, "message": "invalid signature"}
    unsigned = wire.data("GET", sandbox.sandbox_id, 49983, f"/files?path={folder}/f")
    assert unsigned.status_code == 401
    assert unsigned.json() == {"code": 401, "message": "missing signature query parameter"}
