"""Artifacts: read, linked, told apart, copied; and what the original got wrong."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable
from pathlib import Path

import httpx
import pandas as pd
import pytest

from cove import Cove, NotFound
from cove.langgraph_sandbox import Config, SessionManager
from cove.langgraph_sandbox.artifacts import ArtifactStore, fetch_artifact_urls, get_metadata, load_csv, load_parquet, read_bytes, read_text

Make = Callable[..., SessionManager]


def test_S4_109_D1_the_links_of_a_session_are_listed_and_work_without_a_key(manager: Make, key: str) -> None:
    sm = manager()
    sm.start(key)
    for name in ("one", "two"):
        sm.exec(key, f"open('/session/artifacts/{name}.txt', 'w').write('{name}')")
    told = fetch_artifact_urls(key)
    assert [(a["name"], httpx.get(a["url"]).text) for a in told] == [("two.txt", "two"), ("one.txt", "one")]
    assert httpx.get(told[0]["url"][:-2] + "xx").status_code == 401


def test_S4_110_readers_by_id(manager: Make, key: str) -> None:
    sm = manager()
    sm.start(key)
    out = sm.exec(key, "import pandas as pd\ndf = pd.DataFrame({'a': [1, 2]})\ndf.to_csv('/session/artifacts/t.csv', index=False)\n"
                       "df.to_parquet('/session/artifacts/t.parquet')\nopen('/session/artifacts/n.txt', 'w').write('žluťoučký')")
    ids = {a["name"]: a["id"] for a in out["artifacts"]}
    assert get_metadata(ids["n.txt"])["mime"].startswith("text/plain")
    assert read_text(ids["n.txt"]) == "žluťoučký" and read_text(ids["n.txt"], max_bytes=1) == ""
    assert read_bytes(ids["t.csv"]) == b"a\n1\n2\n"
    frame = pd.DataFrame({"a": [1, 2]})
    assert load_csv(ids["t.csv"]).equals(frame) and load_parquet(ids["t.parquet"]).equals(frame)
    with pytest.raises(NotFound):
        read_bytes("art_" + "0" * 24)


def test_D2_a_link_in_the_drop_box_reads_and_removes_nothing(manager: Make, key: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("of the host")
    sm = manager(session_storage="BIND")
    sm.start(key)
    out = sm.exec(key, f"import os\nos.symlink('/etc/passwd', '/session/artifacts/passwd')\nos.symlink({str(secret)!r}, '/session/artifacts/s')\n"
                       "os.mkfifo('/session/artifacts/fifo')\nos.symlink('/', '/session/artifacts/root')\nopen('/session/artifacts/real', 'w').write('1')")
    assert [a["name"] for a in out["artifacts"] if a["id"]] == ["real"]
    assert secret.read_text() == "of the host" and sm.exec(key, "print(open('/etc/passwd').read() != '')")["stdout"] == "True\n"


def test_D5_another_tenant_sees_neither_artifact_nor_content(manager: Make, server: Cove, key: str) -> None:
    foreign = Cove(server.url, os.environ["COVE_TEST_FOREIGN_KEY"])
    sm = manager()
    sm.start(key)
    (artifact,) = sm.exec(key, "open('/session/artifacts/a', 'w').write('the same bytes')")["artifacts"]
    with pytest.raises(NotFound):
        foreign.artifact(artifact["id"])
    theirs = foreign.session(key)
    (other,) = theirs.run("open('/session/artifacts/b', 'w').write('the same bytes')").artifacts
    assert other.id != artifact["id"] and other.sha256 == artifact["sha256"]
    assert [a.name for a in foreign.artifacts(sha256=artifact["sha256"])] == ["b"]
    theirs.remove()


def test_D10_D12_nested_overwritten_and_equal_names_are_all_kept_with_their_paths(manager: Make, key: str) -> None:
    sm = manager()
    sm.start(key)
    write = "import os\nfor p, t in {files}.items():\n    os.makedirs(os.path.dirname('/session/artifacts/' + p), exist_ok=True)\n    open('/session/artifacts/' + p, 'w').write(t)"
    first = sm.exec(key, write.format(files={"x/a.txt": "1", "y/a.txt": "2", "b.txt": "3"}))
    again = sm.exec(key, write.format(files={"b.txt": "4", "x/a.txt": "5"}))
    assert [(a["path"], read_text(a["id"])) for a in first["artifacts"]] == [("b.txt", "3"), ("x/a.txt", "1"), ("y/a.txt", "2")]
    assert [(a["path"], read_text(a["id"])) for a in again["artifacts"]] == [("b.txt", "4"), ("x/a.txt", "5")]
    assert all(a["sha256"] == hashlib.sha256(read_bytes(a["id"])).hexdigest() for a in first["artifacts"])


def test_D10_a_file_that_is_too_large_is_told_and_stays(manager: Make, key: str) -> None:
    sm = manager(tmpfs_size=256)
    sm.start(key)
    out = sm.exec(key, "f = open('/session/artifacts/big', 'wb')\nf.truncate(120 << 20)\nf.close()")
    (told,) = out["artifacts"]
    assert told["id"] is None and told["error"] and "url" not in told
    assert sm.exec(key, "import os\nprint(os.path.getsize('/session/artifacts/big') >> 20)")["stdout"] == "120\n"


def test_the_client_tells_where_an_artifact_came_from(server: Cove, key: str, tmp_path: Path) -> None:
    session = server.session(key)
    code = "open('/session/artifacts/r.txt', 'w').write('42')"
    (artifact,) = session.run(code, tool_call="call-9").artifacts
    lineage = artifact.lineage()
    assert (lineage.code, lineage.artifact.tool_call, lineage.artifact.session, lineage.artifact.cell) == (code, "call-9", key, 1)
    assert artifact.download(tmp_path) == tmp_path / "r.txt" and (tmp_path / "r.txt").read_text() == "42"
    assert httpx.get(artifact.link(ttl=600).url).text == "42"
    session.sandbox.write("/session/other.bin", b"\x00")
    kept = session.keep("/session/other.bin")
    assert kept.content() == b"\x00" and {a.name for a in session.artifacts()} == {"r.txt", "other.bin"}
    artifact.remove()
    with pytest.raises(NotFound):
        server.artifact(artifact.id)


def test_S4_14_D11_copies_are_where_the_config_says(server: Cove, key: str, tmp_path: Path) -> None:
    (tmp_path / "my.env").write_text(f"DATASET_ACCESS=NONE\nBLOBSTORE_DIR={tmp_path}/blobs\nARTIFACTS_DB={tmp_path}/db/names.db\n")
    sm = SessionManager.from_config(Config.from_env(tmp_path / "my.env"))
    sm.start(key)
    out = sm.exec(key, "for n in 'ab': open(f'/session/artifacts/{n}.txt', 'w').write('same')")
    sha = hashlib.sha256(b"same").hexdigest()
    assert [p.relative_to(tmp_path / "blobs") for p in (tmp_path / "blobs").rglob("*") if p.is_file()] == [Path(sha[:2], sha[2:4], sha)]
    store = ArtifactStore(tmp_path / "blobs", tmp_path / "db" / "names.db")
    assert {(a["filename"], a["sha256"], a["size"]) for a in store.artifacts(key)} == {("a.txt", sha, 4), ("b.txt", sha, 4)}
    assert {a["id"] for a in store.artifacts()} == {a["id"] for a in out["artifacts"]}
    assert store.blob(sha).read_bytes() == b"same"
    sm.stop(key)


def test_copies_that_cannot_be_made_fail_no_run(manager: Make, key: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    sm = manager(blobstore_dir=tmp_path / "file", artifacts_db=tmp_path / "names.db")
    sm.start(key)
    out = sm.exec(key, "open('/session/artifacts/a', 'w').write('1')\nprint('ran')")
    assert (out["ok"], out["stdout"], [a["name"] for a in out["artifacts"]]) == (True, "ran\n", ["a"])
    assert not (tmp_path / "names.db").exists()  # nothing is named whose bytes are not there


def test_S4_14_without_a_setting_nothing_is_copied(manager: Make, key: str, tmp_path: Path) -> None:
    sm = manager()
    sm.start(key)
    sm.exec(key, "open('/session/artifacts/a', 'w').write('1')")
    assert list(tmp_path.iterdir()) == []


def test_S4_123_a_link_that_has_ended_is_refused_with_a_reason(server: Cove, key: str) -> None:
    (artifact,) = server.session(key).run("open('/session/artifacts/a', 'w').write('1')").artifacts
    link = artifact.link(ttl=1)
    import time

    time.sleep(1.2)
    answer = httpx.get(link.url)
    assert answer.status_code == 401 and "expired" in answer.text.lower()


async def test_the_async_client_has_sessions_artifacts_and_datasets(key: str, tmp_path: Path) -> None:
    from cove import AsyncCove

    async with AsyncCove() as client:
        session = await client.session(key, datasets={"access": "api"})
        staged = await session.stage("d.txt", io.BytesIO(b"data"))
        assert (staged.status, staged.path) == ("loaded", "/session/data/d.txt")
        out = await session.run("open('/session/artifacts/c', 'w').write(open('/session/data/d.txt').read())")
        (artifact,) = out.artifacts
        assert await artifact.content() == b"data" and [d.id for d in (await artifact.lineage()).artifact.datasets] == ["d.txt"]
        await artifact.download(tmp_path / "c")
        assert (tmp_path / "c").read_bytes() == b"data"
        again = await session.mark("e.txt", "loaded", sha256=staged.sha256)
        assert [d.id for d in await session.datasets()] == ["d.txt", "e.txt"] and again.size == 4
        assert [e["event"] for e in await session.log()][0] == "session_started"
        assert [a.id async for a in client.artifacts(session=key)] == [artifact.id]
        same = [await session.run("n = globals().get('n', 0) + 1\nn", idempotency_key="once") for _ in range(2)]
        assert [(o.text, o.replayed) for o in same] == [("1", False), ("1", True)]
        await session.stop()
        assert (await client.get_session(key)).info.state == "stopped"
        await session.remove()
