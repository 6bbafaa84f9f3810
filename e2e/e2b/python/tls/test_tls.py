"""The same SDK with E2B_DOMAIN alone: names for hosts, TLS and HTTP/2 instead of headers on plain HTTP."""

import os

import httpx
import pytest

from e2b import Sandbox
from e2b_code_interpreter import Sandbox as CodeSandbox


@pytest.fixture(scope="module")
def sbx():
    made = CodeSandbox.create(timeout=1200)
    yield made
    made.kill()


@pytest.mark.proves("Sandbox.create (E2B_DOMAIN)")
def test_names_alone_find_the_server(sbx):
    assert "E2B_API_URL" not in os.environ and "E2B_SANDBOX_URL" not in os.environ
    assert sbx.get_host(49983) == f"49983-{sbx.sandbox_id}.{sbx.sandbox_domain}"
    assert Sandbox.get_info(sbx.sandbox_id).sandbox_id == sbx.sandbox_id


@pytest.mark.proves("commands.run (E2B_DOMAIN)", "files.write (E2B_DOMAIN)")
def test_commands_and_files(sbx):
    assert sbx.commands.run("echo over tls").stdout == "over tls\n"
    data = os.urandom(3_000_000)
    sbx.files.write("big", data)
    assert sbx.files.read("big", format="bytes") == data
    handles = [sbx.commands.run("sleep 0.5; echo x", background=True) for _ in range(20)]
    assert [h.wait().stdout for h in handles] == ["x\n"] * 20


@pytest.mark.proves("run_code (E2B_DOMAIN)")
def test_code(sbx):
    assert sbx.run_code("6 * 7").text == "42"


@pytest.mark.proves("Sandbox.download_url (E2B_DOMAIN)")
def test_signed_urls(sbx):
    sbx.files.write("f", "x")
    assert httpx.get(sbx.download_url("f")).text == "x"
    assert httpx.post(sbx.upload_url("g"), files={"file": b"y"}).status_code == 200
    assert sbx.files.read("g") == "y"


@pytest.mark.proves("Sandbox.get_host (E2B_DOMAIN)")
def test_a_preview_has_a_name_of_its_own(sbx):
    sbx.commands.run("mkdir -p site && echo hello > site/index.html")
    sbx.commands.run("cd site && python3 -m http.server 8000", background=True, timeout=0)
    sbx.commands.run("for i in $(seq 1200); do ss -Htln sport = :8000 | grep -q . && exit 0; sleep 0.1; done; exit 1", timeout=0)
    url = f"https://{sbx.get_host(8000)}/"
    with httpx.Client(http2=True) as two, httpx.Client() as one:
        answer = two.get(url)
        assert (answer.text, answer.http_version) == ("hello\n", "HTTP/2")
        assert one.get(url).http_version == "HTTP/1.1"
        closed = two.get(f"https://{sbx.get_host(8765)}/")
        assert closed.status_code == 502 and closed.json()["port"] == 8765
