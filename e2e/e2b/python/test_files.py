"""Files and directories."""

import hashlib
import io
import time

import pytest

from e2b import (
    AuthenticationException,
    FileNotFoundException,
    FileType,
    InvalidArgumentException,
    NotEnoughSpaceException,
)


@pytest.mark.proves("files.write", "files.read")
def test_text_comes_back(sandbox, folder):
    path = f"{folder}/deep/er/note.txt"
    info = sandbox.files.write(path, "grüße 😀\n")
    assert (info.name, info.path, info.type, info.metadata) == ("note.txt", path, FileType.FILE, None)
    assert sandbox.files.read(path) == "grüße 😀\n"
    assert sandbox.files.write(path, "").path == path
    assert sandbox.files.read(path) == ""


@pytest.mark.proves("files.read", "files.write")
def test_bytes_and_streams(sandbox, folder):
    data = bytes(range(256)) * 1000
    sandbox.files.write(f"{folder}/b", data)
    assert sandbox.files.read(f"{folder}/b", format="bytes") == bytearray(data)
    assert b"".join(sandbox.files.read(f"{folder}/b", format="stream")) == data
    sandbox.files.write(f"{folder}/io", io.BytesIO(data))
    sandbox.files.write(f"{folder}/it", (data[i : i + 1000] for i in range(0, len(data), 1000)))
    sandbox.files.write(f"{folder}/oct", data, use_octet_stream=True)
    for name in ("io", "it", "oct"):
        assert sandbox.files.read(f"{folder}/{name}", format="bytes") == data


@pytest.mark.proves("files.read", "files.write")
def test_gzip_both_ways(sandbox, folder):
    text = "again and again " * 10_000
    sandbox.files.write(f"{folder}/z", text, gzip=True)
    assert sandbox.files.read(f"{folder}/z") == text
    assert sandbox.files.read(f"{folder}/z", gzip=True) == text
    assert sandbox.files.get_info(f"{folder}/z").size == len(text)


@pytest.mark.proves("files.write")
def test_a_file_is_replaced_and_keeps_its_mode(sandbox, folder):
    path = f"{folder}/run.sh"
    sandbox.files.write(path, "a longer first text")
    sandbox.commands.run(f"chmod 755 {path}")
    sandbox.files.write(path, "short")
    assert sandbox.files.read(path) == "short"
    assert sandbox.files.get_info(path).mode == 0o755


@pytest.mark.proves("files.write_files")
def test_many_files_in_one_call(sandbox, folder):
    entries = [{"path": f"{folder}/d{i}/f{i}.txt", "data": f"text {i}"} for i in range(10)]
    infos = sandbox.files.write_files(entries)
    assert [i.path for i in infos] == [e["path"] for e in entries]
    assert [sandbox.files.read(e["path"]) for e in entries] == [e["data"] for e in entries]
    assert sandbox.files.write_files([]) == []


@pytest.mark.proves("files.write_files")
def test_one_and_relative_and_nested_names(sandbox, tag):
    infos = sandbox.files.write_files([{"path": f"{tag}/a", "data": "1"}, {"path": f"{tag}/b c/ü", "data": b"2"}])
    assert [i.path for i in infos] == [f"/home/user/{tag}/a", f"/home/user/{tag}/b c/ü"]
    assert [i.name for i in infos] == ["a", "ü"]
    assert sandbox.files.read(f"{tag}/b c/ü") == "2"
    sandbox.files.remove(tag)


@pytest.mark.proves("files.write", "files.get_info")
def test_metadata_stays_with_a_file(sandbox, folder):
    path = f"{folder}/m"
    info = sandbox.files.write(path, "x", metadata={"Author": "ada", "kind": "note 1"})
    assert info.metadata == {"author": "ada", "kind": "note 1"}
    assert sandbox.files.get_info(path).metadata == {"author": "ada", "kind": "note 1"}
    assert sandbox.files.list(folder)[0].metadata == {"author": "ada", "kind": "note 1"}
    assert "user.e2b.author" in sandbox.commands.run(
        f"python3 -c \"import os; print(os.listxattr('{path}'))\""
    ).stdout
    sandbox.files.write(path, "y", metadata={"kind": "other"})
    assert sandbox.files.get_info(path).metadata == {"kind": "other"}
    moved = sandbox.files.rename(path, path + "2")
    assert moved.metadata == {"kind": "other"}


@pytest.mark.proves("files.read")
def test_what_is_missing_or_a_directory_cannot_be_read(sandbox, folder):
    with pytest.raises(FileNotFoundException, match="does not exist"):
        sandbox.files.read(f"{folder}/nothing")
    with pytest.raises(InvalidArgumentException, match="is a directory"):
        sandbox.files.read(folder)
    with pytest.raises(InvalidArgumentException):
        sandbox.files.write(folder, "x")


@pytest.mark.proves("files.read")
def test_a_file_without_a_size_is_read_whole(sandbox):
    assert "MemTotal" in sandbox.files.read("/proc/meminfo")
    assert sandbox.files.read("/proc/self/cmdline", format="bytes")


@pytest.mark.proves("files.read", "files.write")
def test_users_and_owners(sandbox, tag):
    root = sandbox.files.write(f"/etc/{tag}", "x", user="root")
    assert root.path == f"/etc/{tag}"
    info = sandbox.files.get_info(f"/etc/{tag}")
    assert (info.owner, info.group) == ("root", "root")
    assert sandbox.files.write(f"{tag}", "x", user="root").path == f"/root/{tag}"
    sandbox.files.remove(f"/root/{tag}", user="root")
    sandbox.files.remove(f"/etc/{tag}", user="root")
    with pytest.raises(AuthenticationException):
        sandbox.files.read("/etc/hostname", user="nobodyknows")
    with pytest.raises(AuthenticationException):
        sandbox.files.list("/", user="nobodyknows")


@pytest.mark.proves("files.get_info")
def test_what_is_known_of_a_file_and_a_directory(sandbox, folder):
    sandbox.files.write(f"{folder}/f", "12345")
    f = sandbox.files.get_info(f"{folder}/f")
    assert (f.name, f.path, f.type, f.size) == ("f", f"{folder}/f", FileType.FILE, 5)
    assert (f.mode, f.permissions, f.owner, f.group, f.symlink_target) == (0o644, "-rw-r--r--", "user", "user", None)
    assert abs(f.modified_time.timestamp() - time.time()) < 60
    d = sandbox.files.get_info(folder)
    assert (d.type, d.mode, d.permissions, d.owner, d.group) == (FileType.DIR, 0o755, "drwxr-xr-x", "user", "user")
    assert d.size > 0
    with pytest.raises(FileNotFoundException):
        sandbox.files.get_info(f"{folder}/nothing")


@pytest.mark.proves("files.get_info", "files.list")
def test_symlinks_show_their_target(sandbox, folder):
    sandbox.files.write(f"{folder}/f", "12345")
    sandbox.commands.run(f"ln -s f {folder}/l && ln -s {folder} {folder}/d")
    link = sandbox.files.get_info(f"{folder}/l")
    assert link.type == FileType.SYMLINK
    assert (link.name, link.symlink_target, link.mode) == ("l", f"{folder}/f", 0o644)
    assert link.permissions.startswith("L")
    assert {e.name: e.symlink_target for e in sandbox.files.list(folder)} == {"f": None, "l": f"{folder}/f", "d": folder}


@pytest.mark.proves("files.list")
def test_a_listing_goes_as_deep_as_asked(sandbox, folder):
    sandbox.files.write_files([{"path": f"{folder}/{p}", "data": p} for p in ("a/b/c/f", "a/g", "h")])

    def names(**kw):
        return [e.path.removeprefix(folder + "/") for e in sandbox.files.list(folder, **kw)]

    assert names() == ["a", "h"]
    assert names(depth=2) == ["a", "a/b", "a/g", "h"]
    assert names(depth=10) == ["a", "a/b", "a/b/c", "a/b/c/f", "a/g", "h"]
    with pytest.raises(InvalidArgumentException):
        names(depth=0)
    with pytest.raises(FileNotFoundException):
        sandbox.files.list(f"{folder}/nothing")
    with pytest.raises(InvalidArgumentException):
        sandbox.files.list(f"{folder}/h")


@pytest.mark.proves("files.list", "files.exists")
def test_relative_and_home_paths(sandbox):
    sandbox.files.write("~/at-home", "x")
    assert sandbox.files.exists("at-home")
    assert sandbox.files.get_info("at-home").path == "/home/user/at-home"
    assert sandbox.files.get_info("./at-home").path == "/home/user/at-home"
    assert "at-home" in [e.name for e in sandbox.files.list(".")]
    assert "at-home" in [e.name for e in sandbox.files.list("")]
    sandbox.files.remove("at-home")


@pytest.mark.proves("files.exists")
def test_exists(sandbox, folder):
    assert sandbox.files.exists(folder) is True
    assert sandbox.files.exists(f"{folder}/x") is False


@pytest.mark.proves("files.make_dir")
def test_directories_are_made_once(sandbox, folder):
    assert sandbox.files.make_dir(f"{folder}/x/y/z") is True
    assert sandbox.files.make_dir(f"{folder}/x/y/z") is False
    sandbox.files.write(f"{folder}/f", "")
    with pytest.raises(InvalidArgumentException):
        sandbox.files.make_dir(f"{folder}/f")


@pytest.mark.proves("files.rename")
def test_a_rename_moves_and_makes_room(sandbox, folder):
    sandbox.files.write(f"{folder}/a", "x")
    info = sandbox.files.rename(f"{folder}/a", f"{folder}/new/b")
    assert (info.name, info.path) == ("b", f"{folder}/new/b")
    assert not sandbox.files.exists(f"{folder}/a")
    assert sandbox.files.read(f"{folder}/new/b") == "x"
    with pytest.raises(FileNotFoundException):
        sandbox.files.rename(f"{folder}/nothing", f"{folder}/c")


@pytest.mark.proves("files.remove")
def test_removing_takes_all_and_forgives_nothing_there(sandbox, folder):
    sandbox.files.write(f"{folder}/x/y/z", "x")
    sandbox.files.remove(f"{folder}/x")
    assert not sandbox.files.exists(f"{folder}/x")
    sandbox.files.remove(f"{folder}/x")


@pytest.mark.proves("files.read", "files.write")
def test_a_hundred_megabytes_are_the_same_bytes(sandbox, folder):
    block = hashlib.sha256(b"seed").digest() * 32768  # 1 MiB
    digest = hashlib.sha256()

    def blocks():
        for i in range(100):
            piece = i.to_bytes(4, "big") + block[4:]
            digest.update(piece)
            yield piece

    sandbox.files.write(f"{folder}/big", blocks())
    assert sandbox.commands.run(f"sha256sum {folder}/big").stdout.split()[0] == digest.hexdigest()
    back = hashlib.sha256()
    for piece in sandbox.files.read(f"{folder}/big", format="stream"):
        back.update(piece)
    assert back.hexdigest() == digest.hexdigest()


@pytest.mark.proves("files.write")
def test_S0_69_a_full_disk_is_told(make):
    sbx = make()
    sbx.commands.run("fallocate -l $(($(df --output=avail -B1 / | tail -1) - 100000)) fill")
    with pytest.raises(NotEnoughSpaceException):
        sbx.files.write("big", "x" * 1_000_000)
    sbx.files.remove("fill")
    sbx.files.write("big", "x" * 1_000_000)
