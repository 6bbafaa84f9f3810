"""Files and directories, by the synchronous SDK."""

import hashlib
import io
import time
from datetime import datetime, timezone

import pytest

from conftest import out
from opensandbox.exceptions import SandboxApiException
from opensandbox.models.filesystem import ContentReplaceEntry, MoveEntry, SearchEntry, SetPermissionEntry, WriteEntry

proves = pytest.mark.proves


@proves("files.write_file")
def test_S3_13_a_file_is_made_and_overwritten(sandbox, folder):
    path = f"{folder}/deep/er/a b.txt"
    sandbox.files.write_file(path, "the first, longer text")
    sandbox.files.write_file(path, "second")
    assert out(sandbox.commands.run(f"cat '{path}'")) == ["second"]


@proves("files.read_file", "files.write_file")
@pytest.mark.parametrize("text", ["LangGraph + OpenSandbox\n", "", "\n\n", "no newline", "ü 🙂 \u0085 \u2028\r\n"])
def test_S3_14_text_comes_back_as_it_went(sandbox, folder, text):
    sandbox.files.write_file(f"{folder}/text", text)
    assert sandbox.files.read_file(f"{folder}/text") == text


@proves("files.read_file", "files.get_file_info")
def test_S3_15_a_missing_file_is_a_typed_not_found(sandbox, folder):
    for call in (sandbox.files.read_file, lambda p: sandbox.files.get_file_info([p]), sandbox.files.read_bytes):
        with pytest.raises(SandboxApiException) as missing:
            call(f"{folder}/none")
        assert missing.value.status_code == 404
        assert missing.value.error.code == "FILE_NOT_FOUND"


@proves("files.write_file", "files.read_bytes", "files.read_bytes_stream")
def test_bytes_and_streams(sandbox, folder):
    data = bytes(range(256)) * 4096
    sandbox.files.write_file(f"{folder}/bytes", data)
    sandbox.files.write_file(f"{folder}/stream", io.BytesIO(data))
    assert sandbox.files.read_bytes(f"{folder}/bytes") == data
    assert b"".join(sandbox.files.read_bytes_stream(f"{folder}/stream", chunk_size=10_000)) == data
    assert sandbox.files.read_bytes(f"{folder}/bytes", range_header="bytes=0-9") == data[:10]
    assert sandbox.files.read_bytes(f"{folder}/bytes", range_header="bytes=-3") == data[-3:]
    with pytest.raises(SandboxApiException) as beyond:
        sandbox.files.read_bytes(f"{folder}/bytes", range_header="bytes=99999999-")
    assert beyond.value.status_code == 416


@proves("files.read_file")
@pytest.mark.newest
def test_lines_of_a_file(sandbox, folder):
    sandbox.files.write_file(f"{folder}/lines", "".join(f"line {i}\n" for i in range(1, 11)))
    assert sandbox.files.read_file(f"{folder}/lines", offset=3, limit=2) == "line 3\nline 4\n"
    assert sandbox.files.read_file(f"{folder}/lines", offset=10) == "line 10\n"


@proves("files.write_files", "files.get_file_info")
def test_many_files_with_modes_and_owners(sandbox, folder):
    sandbox.files.write_files([
        WriteEntry(path=f"{folder}/plain", data="1"),
        WriteEntry(path=f"{folder}/secret", data=b"22", mode=600),
        WriteEntry(path=f"{folder}/nobodys", data="333", mode=644, owner="nobody", group="nogroup"),
    ])
    info = sandbox.files.get_file_info([f"{folder}/plain", f"{folder}/secret", f"{folder}/nobodys"])
    assert {p.removeprefix(folder): (i.mode, i.size) for p, i in info.items()} == {"/plain": (755, 1), "/secret": (600, 2), "/nobodys": (644, 3)}
    assert (info[f"{folder}/nobodys"].owner, info[f"{folder}/nobodys"].group) == ("nobody", "nogroup")
    assert info[f"{folder}/plain"].owner == out(sandbox.commands.run("id -un"))[0]
    made = info[f"{folder}/plain"]
    assert abs((made.modified_at - datetime.now(timezone.utc)).total_seconds()) < 30
    assert abs((made.modified_at - made.created_at).total_seconds()) < 2


@proves("files.create_directories", "files.delete_directories", "files.get_file_info")
def test_directories(sandbox, folder):
    sandbox.files.create_directories([WriteEntry(path=f"{folder}/a/b", mode=755), WriteEntry(path=f"{folder}/c", mode=700)])
    info = sandbox.files.get_file_info([f"{folder}/a/b", f"{folder}/c"])
    assert (info[f"{folder}/a/b"].mode, info[f"{folder}/c"].mode) == (755, 700)
    sandbox.files.create_directories([WriteEntry(path=f"{folder}/a/b", mode=755)])
    sandbox.files.write_file(f"{folder}/a/b/file", "x")
    sandbox.files.delete_directories([f"{folder}/a", f"{folder}/c", f"{folder}/none"])
    assert out(sandbox.commands.run(f"ls {folder}")) == []


@proves("files.list_directory")
@pytest.mark.newest
def test_a_directory_is_listed_to_a_depth(sandbox, folder):
    from opensandbox.models.filesystem import DirectoryListEntry

    sandbox.commands.run(f"cd {folder} && mkdir -p d/e && touch b d/c d/e/f && ln -s b a")

    def listed(**kw):
        return [(e.path.removeprefix(folder + "/"), e.entry_type) for e in sandbox.files.list_directory(DirectoryListEntry(path=folder, **kw))]

    assert listed() == listed(depth=1) == [("a", "symlink"), ("b", "file"), ("d", "directory")]
    assert [p for p, _ in listed(depth=2)] == ["a", "b", "d", "d/c", "d/e"]
    with pytest.raises(SandboxApiException) as missing:
        sandbox.files.list_directory(DirectoryListEntry(path=f"{folder}/none"))
    assert missing.value.status_code == 404


@proves("files.move_files", "files.delete_files")
def test_moving_and_deleting(sandbox, folder):
    sandbox.files.write_files([WriteEntry(path=f"{folder}/{n}", data=n) for n in "ab"])
    sandbox.files.move_files([MoveEntry(src=f"{folder}/a", dest=f"{folder}/new/a")])
    assert sandbox.files.read_file(f"{folder}/new/a") == "a"
    with pytest.raises(SandboxApiException) as missing:
        sandbox.files.move_files([MoveEntry(src=f"{folder}/none", dest=f"{folder}/x")])
    assert missing.value.status_code == 404
    with pytest.raises(SandboxApiException):
        sandbox.files.move_files([MoveEntry(src=f"{folder}/b", dest=f"{folder}/new/a")])
    sandbox.files.delete_files([f"{folder}/b", f"{folder}/none"])
    with pytest.raises(SandboxApiException):
        sandbox.files.delete_files([f"{folder}/new"])
    assert out(sandbox.commands.run(f"ls {folder}")) == ["new"]


@proves("files.replace_contents")
def test_contents_are_replaced(sandbox, folder):
    path = f"{folder}/text"
    sandbox.files.write_file(path, "a.b a.b a-b")
    before = sandbox.files.get_file_info([path])[path].modified_at
    time.sleep(0.02)
    sandbox.files.replace_contents([ContentReplaceEntry(path=path, old_content="a.b", new_content="$1")])
    assert sandbox.files.read_file(path) == "$1 $1 a-b"
    assert sandbox.files.get_file_info([path])[path].modified_at > before
    with pytest.raises(SandboxApiException) as empty:
        sandbox.files.replace_contents([ContentReplaceEntry(path=path, old_content="", new_content="x")])
    assert empty.value.status_code == 400


@proves("files.replace_contents_detailed")
@pytest.mark.newest
def test_replacements_are_counted(sandbox, folder):
    path = f"{folder}/text"
    sandbox.files.write_file(path, "x x y")
    count = [sandbox.files.replace_contents_detailed([ContentReplaceEntry(path=path, old_content=old, new_content="z")])[0].replaced_count for old in ("x", "q")]
    assert count == [2, 0]


@proves("files.search")
def test_search_finds_files_by_their_names(sandbox, folder):
    sandbox.commands.run(f"cd {folder} && mkdir -p d/e.py && touch a.py b.txt d/c.py d/e.py/f .hidden.py")

    def found(pattern):
        return sorted(e.path.removeprefix(folder + "/") for e in sandbox.files.search(SearchEntry(path=folder, pattern=pattern)))

    assert found("*.py") == [".hidden.py", "a.py", "d/c.py"]
    assert found("*") == [".hidden.py", "a.py", "b.txt", "d/c.py", "d/e.py/f"]
    assert found("[ab].*") == ["a.py", "b.txt"]
    assert found("{a,b}.*") == ["a.py", "b.txt"]
    assert found("none") == []
    with pytest.raises(SandboxApiException) as missing:
        sandbox.files.search(SearchEntry(path=f"{folder}/none", pattern="*"))
    assert missing.value.status_code == 404


@proves("files.set_permissions")
def test_permissions(sandbox, folder):
    sandbox.files.write_file(f"{folder}/f", "x")
    sandbox.files.set_permissions([SetPermissionEntry(path=f"{folder}/f", mode=640, owner="nobody", group="nogroup")])
    info = sandbox.files.get_file_info([f"{folder}/f"])[f"{folder}/f"]
    assert (info.mode, info.owner, info.group) == (640, "nobody", "nogroup")


@proves("Sandbox.files_with_identity")
@pytest.mark.newest
def test_files_as_another_user(sandbox, folder):
    sandbox.commands.run(f"chmod 777 {folder}")
    files = sandbox.files_with_identity(1234, 1234)
    files.write_file(f"{folder}/theirs", "x")
    info = sandbox.files.get_file_info([f"{folder}/theirs"])[f"{folder}/theirs"]
    assert info.owner == "1234"
    sandbox.files.write_file(f"{folder}/roots", "x", mode=600)
    with pytest.raises(SandboxApiException):
        files.read_file(f"{folder}/roots")


@proves("files.write_file", "files.read_bytes_stream")
def test_a_large_file_goes_both_ways(sandbox, folder):
    block = hashlib.sha256(b"block").digest() * 32768  # 1 MiB
    size, digest = 64, hashlib.sha256()
    for _ in range(size):
        digest.update(block)

    class Blocks(io.RawIOBase):
        left = size

        def readable(self):
            return True

        def read(self, n=-1):
            if self.left == 0:
                return b""
            self.left -= 1
            return block

    sandbox.files.write_file(f"{folder}/large", Blocks())
    assert out(sandbox.commands.run(f"sha256sum < {folder}/large")) == [digest.hexdigest() + "  -"]
    back = hashlib.sha256()
    for chunk in sandbox.files.read_bytes_stream(f"{folder}/large", chunk_size=1 << 20):
        back.update(chunk)
    assert back.hexdigest() == digest.hexdigest()


@proves("files.write_file", "files.read_file")
def test_through_the_servers_proxy_too(make, config):
    sbx = make(connection_config=config(use_server_proxy=True))
    sbx.files.write_file("/tmp/proxied", "x" * 100_000)
    assert len(sbx.files.read_file("/tmp/proxied")) == 100_000
    assert f"/sandboxes/{sbx.id}/proxy/18080" in sbx.get_endpoint(18080).endpoint
    assert out(sbx.commands.run("echo proxied")) == ["proxied"]


@proves("files.read_file")
@pytest.mark.parametrize("path", ["/etc/shadow", "/proc/1/environ"])
def test_what_the_sandbox_cannot_read_is_not_read_for_it(make, path):
    """The agent reads as the sandbox's user, and never a file of the host's."""
    sbx = make("base")
    try:
        text = sbx.files.read_file(path)
    except SandboxApiException as refused:
        assert refused.status_code in (403, 404, 500, 400)
    else:
        assert "hunter2" not in text
