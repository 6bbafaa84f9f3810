"""Watching directories."""

import pytest

from e2b import FileNotFoundException, FilesystemEventType, InvalidArgumentException, SandboxException

CREATE, CHMOD, WRITE = FilesystemEventType.CREATE, FilesystemEventType.CHMOD, FilesystemEventType.WRITE
REMOVE, RENAME = FilesystemEventType.REMOVE, FilesystemEventType.RENAME


def seen(watch):
    return [(e.name, e.type) for e in watch.get_new_events()]


@pytest.mark.proves("files.watch_dir", "WatchHandle.get_new_events")
def test_a_new_file_is_three_events(sandbox, folder):
    watch = sandbox.files.watch_dir(folder)
    assert seen(watch) == []
    sandbox.files.write(f"{folder}/f", "x")
    assert seen(watch) == [("f", CREATE), ("f", CHMOD), ("f", WRITE)]
    assert seen(watch) == []
    watch.stop()


@pytest.mark.proves("files.watch_dir")
def test_changes_moves_and_removals(sandbox, folder):
    sandbox.files.write(f"{folder}/f", "x")
    watch = sandbox.files.watch_dir(folder)
    sandbox.commands.run("echo y >> f", cwd=folder)
    assert ("f", WRITE) in seen(watch)
    sandbox.commands.run("chmod 600 f", cwd=folder)
    assert seen(watch) == [("f", CHMOD)]
    sandbox.files.rename(f"{folder}/f", f"{folder}/g")
    events = seen(watch)
    assert ("f", RENAME) in events and ("g", CREATE) in events
    sandbox.files.remove(f"{folder}/g")
    assert ("g", REMOVE) in seen(watch)
    watch.stop()


@pytest.mark.proves("files.watch_dir")
def test_below_is_seen_only_when_asked_for(sandbox, folder):
    sandbox.files.make_dir(f"{folder}/sub")
    flat = sandbox.files.watch_dir(folder)
    deep = sandbox.files.watch_dir(folder, recursive=True)
    sandbox.files.write(f"{folder}/sub/f", "x")
    assert [e for e in seen(flat) if e[0] != "sub"] == []
    assert seen(deep)[0] == ("sub/f", CREATE)
    flat.stop()
    deep.stop()


@pytest.mark.proves("files.watch_dir")
def test_a_directory_made_later_is_watched_too(sandbox, folder):
    watch = sandbox.files.watch_dir(folder, recursive=True)
    sandbox.files.make_dir(f"{folder}/new")
    sandbox.files.write(f"{folder}/new/f", "x")
    events = seen(watch)
    assert ("new", CREATE) in events
    assert ("new/f", CREATE) in events and ("new/f", WRITE) in events
    watch.stop()


@pytest.mark.proves("files.watch_dir")
def test_events_may_tell_of_their_entry(sandbox, folder):
    watch = sandbox.files.watch_dir(folder, include_entry=True)
    sandbox.files.write(f"{folder}/f", "12345", metadata={"k": "v"})
    created = [e for e in watch.get_new_events() if e.type == CREATE]
    assert [(e.entry.name, e.entry.path, e.entry.owner) for e in created] == [("f", f"{folder}/f", "user")]
    sandbox.files.remove(f"{folder}/f")
    assert [e.entry for e in watch.get_new_events() if e.type == REMOVE] == [None]
    watch.stop()


@pytest.mark.proves("files.watch_dir")
def test_only_a_directory_that_is_there_can_be_watched(sandbox, folder):
    with pytest.raises(FileNotFoundException):
        sandbox.files.watch_dir(f"{folder}/nothing")
    sandbox.files.write(f"{folder}/f", "x")
    with pytest.raises(InvalidArgumentException):
        sandbox.files.watch_dir(f"{folder}/f")
    sandbox.files.watch_dir(folder, allow_network_mounts=True).stop()


@pytest.mark.proves("WatchHandle.stop")
def test_a_stopped_watch_tells_no_more(sandbox, folder):
    watch = sandbox.files.watch_dir(folder)
    watch.stop()
    with pytest.raises(SandboxException):
        watch.get_new_events()
