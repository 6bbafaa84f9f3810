"""Datasets: selected, staged, listed, exported."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pandas as pd
import pytest
from test_tools import payload, run  # type: ignore[import-not-found]

from cove import Cove, CoveError, Dataset
from cove.langgraph_sandbox import SessionManager, make_code_sandbox_tool, make_export_datasets_tool, make_list_datasets_tool, make_select_dataset_tool
from cove.langgraph_sandbox.datasets import cache

Make = Callable[..., SessionManager]


@pytest.fixture
def parquet() -> bytes:
    out = io.BytesIO()
    pd.DataFrame({"a": [1, 2, 3]}).to_parquet(out)
    return out.getvalue()


class Counting:
    """A fetch function that counts."""

    def __init__(self, content: Any) -> None:
        self.content, self.asked = content, []  # type: ignore[var-annotated]

    def __call__(self, dataset_id: str) -> Any:
        self.asked.append(dataset_id)
        return self.content


@pytest.mark.parametrize("storage", ["TMPFS", "BIND"])
def test_S4_66_S4_68_S4_75_a_sync_function_fetches_and_code_reads_it(manager: Make, key: str, parquet: bytes, storage: str) -> None:
    sm = manager(dataset_access="API", session_storage=storage)
    code = make_code_sandbox_tool(session_manager=sm, session_key_fn=lambda: key)
    told = run(make_select_dataset_tool(session_manager=sm, session_key_fn=lambda: key, fetch_fn=Counting(parquet)), dataset_id="sales")
    assert "/session/data/sales.parquet" in told.text and told.artifact["size"] == len(parquet)
    assert payload(run(code, code="import pandas as pd\nprint(pd.read_parquet('/session/data/sales.parquet').a.sum())"))["stdout"] == "6\n"


def test_S4_66_S4_67_async_functions_and_clients_work_in_sync_and_async_calls(manager: Make, key: str, parquet: bytes) -> None:
    class Client:
        table = {"one": parquet, "two": parquet}

    async def fetch(client: Client, dataset_id: str) -> bytes:
        await asyncio.sleep(0)
        return client.table[dataset_id]

    select = make_select_dataset_tool(session_manager=manager(dataset_access="API"), session_key_fn=lambda: key, fetch_fn=fetch, client=Client())
    assert run(select, dataset_id="one").status == "success"
    told = asyncio.run(select.ainvoke({"dataset_id": "two"}))
    assert told.update["messages"][0].status == "success"


async def test_S4_54_a_sync_function_does_not_block_the_loop(manager: Make, key: str) -> None:
    begun, go = threading.Event(), threading.Event()

    def slow(dataset_id: str) -> bytes:
        begun.set()
        return b"x" if go.wait(30) else b""  # set by the loop, if that is free

    async def let_go() -> None:
        while not begun.is_set():
            await asyncio.sleep(0.01)
        go.set()

    select = make_select_dataset_tool(session_manager=manager(dataset_access="API"), session_key_fn=lambda: key, fetch_fn=slow)
    told, _ = await asyncio.gather(select.ainvoke({"dataset_id": "a.bin"}), let_go())
    assert told.update["messages"][0].artifact["size"] == 1


def test_S4_69_S4_71_S4_74_status_goes_from_pending_to_failed_to_loaded(manager: Make, server: Cove, key: str) -> None:
    sm = manager(dataset_access="API", session_storage="BIND")
    seen: list[str] = []
    broken = True

    def fetch(dataset_id: str) -> bytes:
        seen.append(cache.get_entry_status(file, dataset_id) or "")
        if broken:
            raise ConnectionError("the API is not reachable")
        return b"a,b\n"

    file = sm.session_root / key / "cache_datasets.json"
    select = make_select_dataset_tool(session_manager=sm, session_key_fn=lambda: key, fetch_fn=fetch)
    failed = run(select, dataset_id="t.csv")
    assert failed.status == "error" and failed.text == "Failed to load dataset 't.csv': the API is not reachable"
    assert cache.get_entry_status(file, "t.csv") == "failed"
    assert [(d.id, d.status, d.error) for d in server.get_session(key).datasets()] == [("t.csv", "failed", "the API is not reachable")]
    broken = False
    assert run(select, dataset_id="t.csv").status == "success"
    assert cache.get_entry_status(file, "t.csv") == "loaded" and seen == ["pending", "pending"]
    assert [e["event"] for e in server.get_session(key).log() if "dataset" in e["event"]] == ["dataset_failed", "dataset_loaded"]


def test_S4_70_a_loaded_dataset_is_not_fetched_again(manager: Make, key: str) -> None:
    fetch = Counting(b"x")
    for _ in range(2):  # another manager knows it too
        select = make_select_dataset_tool(session_manager=manager(dataset_access="API"), session_key_fn=lambda: key, fetch_fn=fetch)
        run(select, dataset_id="a.bin")
        run(select, dataset_id="a.bin")
    assert fetch.asked == ["a.bin"]


def test_S4_72_a_large_dataset_is_streamed(manager: Make, key: str) -> None:
    def pieces() -> Iterator[bytes]:
        for i in range(120):
            yield bytes([i]) * (1 << 20)

    sm = manager(dataset_access="API")
    before = _rss()
    told = run(make_select_dataset_tool(session_manager=sm, session_key_fn=lambda: key, fetch_fn=lambda _: pieces()), dataset_id="big.bin")
    assert told.artifact["size"] == 120 << 20 and _rss() - before < 60 << 20
    code = make_code_sandbox_tool(session_manager=sm, session_key_fn=lambda: key)
    assert payload(run(code, code="f = open('/session/data/big.bin', 'rb')\nf.seek(-1, 2)\nprint(f.tell(), f.read())"))["stdout"] == f"{(120 << 20) - 1} b'w'\n"


def _rss() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_S4_68_files_of_any_kind_and_open_files_can_be_staged(manager: Make, key: str, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    sm = manager(dataset_access="API")
    told = run(make_select_dataset_tool(session_manager=sm, session_key_fn=lambda: key, fetch_fn=lambda i: (tmp_path / i).open("rb")), dataset_id="notes.txt")
    assert "/session/data/notes.txt" in told.text
    bad = run(make_select_dataset_tool(session_manager=sm, session_key_fn=lambda: key, fetch_fn=lambda i: None), dataset_id="none.txt")
    assert bad.status == "error" and "NoneType" in bad.text


@pytest.mark.parametrize("bad", ["../x", "a/b", "", "..", "a\0b", "x" * 300])
def test_S4_52_D3_a_dataset_id_that_could_be_a_path_is_refused(manager: Make, key: str, bad: str) -> None:
    sm = manager(dataset_access="API")
    told = run(make_select_dataset_tool(session_manager=sm, session_key_fn=lambda: key, fetch_fn=Counting(b"x")), dataset_id=bad)
    assert told.status == "error" and told.text.startswith(f"Failed to load dataset '{bad}'")
    assert sm.list_datasets(key) == []


def test_S4_73_select_tells_that_it_needs_api_mode(manager: Make, key: str, host_data: Path) -> None:
    fetch = Counting(b"x")
    for sm in (manager(), manager(dataset_access="LOCAL_RO", datasets_path=host_data)):
        told = run(make_select_dataset_tool(session_manager=sm, session_key_fn=lambda: key, fetch_fn=fetch), dataset_id="a")
        assert told.status == "error" and "DATASET_ACCESS=API" in told.text
    assert fetch.asked == []


def test_S4_75_D11_tools_without_a_function_share_the_session_of_the_code_tool(manager: Make, key: str) -> None:
    sm = manager(dataset_access="API")
    select = make_select_dataset_tool(session_manager=sm, fetch_fn=Counting(b"1"))
    code = make_code_sandbox_tool(session_manager=sm, session_key_fn=lambda: key)
    run(select, dataset_id="d.txt")
    assert payload(run(code, code="print(open('/session/data/d.txt').read())"))["stdout"] == "1\n"


def test_S4_76_S4_77_S4_78_S4_79_D16_an_export_has_a_name_of_its_own_and_a_link(manager: Make, key: str, tmp_path: Path) -> None:
    sm = manager(dataset_access="API")
    code = make_code_sandbox_tool(session_manager=sm, session_key_fn=lambda: key)
    export = make_export_datasets_tool(session_manager=sm, session_key_fn=lambda: key)
    run(code, code="open('/session/data/out.csv', 'w').write('a,b\\n1,2\\n')")
    told = [run(export, container_path="/session/data/out.csv") for _ in range(5)]
    names = sorted(p.name for p in (tmp_path / "exports" / "modified_datasets").iterdir())
    assert len(names) == 5 and all(re.fullmatch(r"\d{8}_\d{6}(_\d{6})?_out\.csv", n) for n in names), names
    assert all((tmp_path / "exports" / "modified_datasets" / n).read_text() == "a,b\n1,2\n" for n in names)
    (artifact,) = told[0].artifact
    assert (artifact["name"], artifact["mime"], artifact["size"]) == ("out.csv", "text/csv", 8) and artifact["url"] in told[0].text
    got = httpx.get(artifact["url"])
    assert (got.status_code, got.text, "out.csv" in got.headers["content-disposition"], got.headers["content-length"]) == (200, "a,b\n1,2\n", True, "8")
    assert payload(run(code, code="import os\nprint(os.path.exists('/session/data/out.csv'))"))["stdout"] == "True\n"


@pytest.mark.parametrize(("path", "why"), [
    ("/session/data/none.csv", "no such file"), ("/etc/passwd", "only files below"), ("/session/data/../../etc/passwd", "only files below"),
    ("/session/data", "directory")])
def test_S4_80_D16_an_export_that_cannot_be_is_told(manager: Make, key: str, path: str, why: str) -> None:
    sm = manager(dataset_access="API")
    sm.start(key)
    told = run(make_export_datasets_tool(session_manager=sm, session_key_fn=lambda: key), container_path=path)
    assert told.status == "error" and why in told.text and path in told.text
    assert not Path("exports").exists()


def test_S4_78_D16_a_file_that_is_too_large_for_a_link_is_exported_without(manager: Make, key: str, tmp_path: Path) -> None:
    sm = manager(dataset_access="API")
    sm.start(key)
    sm.exec(key, "open('/session/data/big.bin', 'wb').truncate(60 << 20)")
    told = run(make_export_datasets_tool(session_manager=sm, session_key_fn=lambda: key), container_path="big.bin")
    assert told.status == "success" and "No download URL" in told.text and told.artifact[0]["size"] == 60 << 20
    (exported,) = (tmp_path / "exports" / "modified_datasets").iterdir()
    assert exported.stat().st_size == 60 << 20


def test_D16_an_export_is_bounded_whatever_the_sandbox_says(manager: Make, key: str) -> None:
    sm = manager(dataset_access="API", max_export_bytes=1000)
    sm.start(key)
    sm.exec(key, "open('/session/data/huge', 'wb').truncate(1 << 40)\nopen('/session/data/more', 'wb').write(b'x' * 1001)")
    for name in ("huge", "more"):
        told = run(make_export_datasets_tool(session_manager=sm, session_key_fn=lambda: key), container_path=name)
        assert told.status == "error" and "at most 1000" in told.text
    assert not Path("exports").exists()


def test_S4_80_an_export_of_an_unknown_session_is_told(manager: Make, key: str) -> None:
    told = run(make_export_datasets_tool(session_manager=manager(dataset_access="API"), session_key_fn=lambda: key), container_path="/session/data/a")
    assert told.status == "error" and "start" in told.text


def listed(told: Any) -> dict[str, Any]:
    return json.loads(told.text[told.text.index("{"):])


def test_S4_81_S4_84_list_tells_what_is_staged_and_what_code_wrote(manager: Make, key: str) -> None:
    sm = manager(dataset_access="API")
    run(make_select_dataset_tool(session_manager=sm, session_key_fn=lambda: key, fetch_fn=Counting(b"12345")), dataset_id="a.csv")
    run(make_code_sandbox_tool(session_manager=sm, session_key_fn=lambda: key), code="import os\nopen('/session/data/b.csv', 'w').write('1')\nos.mkdir('/session/data/sub')")
    told = run(make_list_datasets_tool(session_manager=sm, session_key_fn=lambda: key))
    assert told.text.startswith("Datasets in API mode:\n")
    found = listed(told)
    assert (found["mode"], found["path"], found["count"]) == ("API", "/session/data", 2)
    files = {f["name"]: f for f in found["files"]}
    assert {n: (f["path"], f.get("size")) for n, f in files.items()} == {
        "a.csv": ("/session/data/a.csv", 5), "b.csv": ("/session/data/b.csv", 1), "sub/": ("/session/data/sub", None)}
    assert abs(files["b.csv"]["modified"] - time.time()) < 60


def test_S4_82_S4_84_S4_86_S4_87_local_datasets_are_listed_discovered_and_read_only(manager: Make, key: str, host_data: Path) -> None:
    for name in ("b.parquet", "a.parquet", "c.csv"):
        (host_data / name).write_text(name)
    assert cache.discover(host_data) == ["a", "b"] and cache.discover(host_data, "") == ["a.parquet", "b.parquet", "c.csv"]
    sm = manager(dataset_access="LOCAL_RO", datasets_path=host_data)
    told = listed(run(make_list_datasets_tool(session_manager=sm, session_key_fn=lambda: key)))
    assert (told["path"], {f["name"]: f["size"] for f in told["files"]}) == ("/data", {"a.parquet": 9, "b.parquet": 9, "c.csv": 5})
    out = sm.exec(key, "import errno\ntry:\n    open('/data/a.parquet', 'w')\nexcept OSError as e:\n    print(errno.errorcode[e.errno], open('/data/a.parquet').read())")
    assert out["stdout"] == "EROFS a.parquet\n" and (host_data / "a.parquet").read_text() == "a.parquet"


def test_S4_83_list_in_none_mode_says_so(manager: Make, key: str) -> None:
    told = run(make_list_datasets_tool(session_manager=manager(), session_key_fn=lambda: key))
    assert told.text == "No datasets available - sandbox is in NONE mode"


def test_S4_85_list_leaves_no_trace_in_the_session(manager: Make, server: Cove, key: str) -> None:
    sm = manager(dataset_access="API")
    sm.start(key)
    sm.exec(key, "x = 1")
    run(make_list_datasets_tool(session_manager=sm, session_key_fn=lambda: key))
    assert server.get_session(key).info.runs == 1 and set(server.get_session(key).state().variables) == {"x"}


def test_S4_88_a_directory_that_is_not_there_or_not_allowed_is_told(manager: Make, key: str, host_data: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="DATASETS_HOST_RO"):
        cache.discover(tmp_path / "none")
    for directory in (host_data / "none", Path("/etc")):
        with pytest.raises(CoveError) as told:
            manager(dataset_access="LOCAL_RO", datasets_path=directory).start(key)
        assert str(directory) in str(told.value)


def test_S4_88_a_file_that_is_no_parquet_is_told_by_pandas(manager: Make, key: str) -> None:
    sm = manager(dataset_access="API")
    run(make_select_dataset_tool(session_manager=sm, session_key_fn=lambda: key, fetch_fn=Counting(b"not parquet")), dataset_id="sales")
    told = run(make_code_sandbox_tool(session_manager=sm, session_key_fn=lambda: key), code="import pandas as pd\npd.read_parquet('/session/data/sales.parquet')")
    assert told.status == "error" and "arquet" in payload(told)["stderr"].splitlines()[-1]


# --- the file of a session's datasets


def test_S4_69_the_cache_has_three_statuses(tmp_path: Path) -> None:
    path = tmp_path / "cache.json"
    cache.write_entries(path, [Dataset("a", "staging"), Dataset("b", "loaded")])  # the server knows one status more
    assert [e["status"] for e in cache.read_entries(path)] == ["pending", "loaded"]
    path.write_text(json.dumps({"datasets": [{"id": "a", "status": "?"}, {"id": "b"}]}))
    assert (cache.get_entry_status(path, "a"), cache.get_entry_status(path, "b")) == ("pending", "pending")


def test_S4_69_the_cache_keeps_order_and_each_once(tmp_path: Path) -> None:
    path = tmp_path / "s" / "cache.json"
    cache.write_ids(path, ["b", "a", "b", " ", ""])
    cache.add_entry(path, "c")
    cache.add_entry(path, "a", "loaded")
    cache.add_entry(path, " ")
    cache.update_entry_status(path, "b", cache.DatasetStatus.FAILED)
    assert [(e["id"], e["status"]) for e in cache.read_entries(path)] == [("b", "failed"), ("a", "pending"), ("c", "pending")]
    assert (cache.read_ids(path), cache.read_pending_ids(path)) == (["b", "a", "c"], ["a", "c"])
    assert (cache.is_cached(path, "a"), cache.is_cached(path, "z"), cache.get_entry_status(path, "z")) == (True, False, None)
    assert all(re.fullmatch(r".*Z", e["timestamp"]) for e in cache.read_entries(path))
    cache.clear_cache(path)
    assert json.loads(path.read_text()) == {"datasets": []}
    path.write_text("{broken")
    assert cache.read_entries(path) == []
