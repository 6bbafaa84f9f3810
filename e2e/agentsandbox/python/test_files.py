"""Files: what a client writes is where a command looks for it."""

import pytest
from conftest import VERSION

BYTES = bytes(range(256)) * 7

PLACES = [  # what a program names, and where a command finds it
    ("x", "/app/x"),
    ("a/b/x", "/app/a/b/x"),
    ("/app/x", "/app/x"),
    ("/tmp/x", "/tmp/x"),
    ("/tmp/deep/er/x", "/tmp/deep/er/x"),
    ("/home/user/x", "/home/user/x"),
    ("100%20 %2e", "/app/100%20 %2e"),
    ("/tmp/ünï 文 ☃.txt", "/tmp/ünï 文 ☃.txt"),
    ('quote " and \' .txt', '/app/quote " and \' .txt'),
    ("[brackets] {x} $HOME;#", "/app/[brackets] {x} $HOME;#"),
]


def shell_quote(path):
    return "'" + path.replace("'", "'\\''") + "'"


def at_home(path):
    """The client of 0.4 sends the last part of a path only, and no server can know the rest."""
    return "/app/" + path.rsplit("/", 1)[-1] if VERSION < (0, 5) else None


@pytest.mark.parametrize(("path", "place"), PLACES)
def test_a_file_is_where_it_was_written_to(sandbox, path, place):
    sandbox.files.write(path, BYTES)
    place = at_home(path) or place
    size = sandbox.commands.run(f"wc -c < {shell_quote(place)}")
    assert size.stdout.strip() == str(len(BYTES)), size
    assert sandbox.files.read(place) == BYTES
    assert sandbox.files.exists(place)
    if VERSION >= (0, 5):
        assert sandbox.files.read(path) == BYTES
        assert sandbox.files.exists(path)
    sandbox.commands.run(f"rm {shell_quote(place)}")
    assert not sandbox.files.exists(place)


def test_what_a_command_wrote(sandbox, folder):
    sandbox.commands.run(f"printf 'by a command' > {folder}/x; printf home > at-home")
    assert sandbox.files.read(f"{folder}/x") == b"by a command"
    assert sandbox.files.read("at-home") == b"home"
    assert sandbox.files.read("/app/at-home") == b"home"


def test_overwriting(sandbox):
    for content in ("first and long", "second"):
        sandbox.files.write("over", content)
    assert sandbox.files.read("over") == b"second"


def test_ten_megabytes(sandbox):
    content = BYTES * (10 * 2**20 // len(BYTES))
    sandbox.files.write("large", content)
    assert sandbox.files.read("large") == content


def test_an_empty_file(sandbox):
    sandbox.files.write("empty", b"")
    assert sandbox.files.read("empty") == b"" and sandbox.files.exists("empty")


def test_listing(sandbox, folder):
    sandbox.commands.run(f"cd {folder} && mkdir sub && printf 1234 > file && ln -s sub link && ln -s nowhere dangling")
    got = {e.name: (e.type, e.size) for e in sandbox.files.list(folder)}
    assert got["sub"][0] == got["link"][0] == "directory"
    assert got["file"] == ("file", 4)
    assert set(got) == {"sub", "link", "file", "dangling"}
    assert sandbox.files.list(f"{folder}/sub") == []
    assert {"tmp", "app", "etc"} <= {e.name for e in sandbox.files.list("/")}
    sandbox.files.write("listed", b"x")
    assert "listed" in {e.name for e in sandbox.files.list(".")}


@pytest.mark.parametrize("path", ["missing", "/missing/deep", "/tmp"])
def test_what_cannot_be_read(sandbox, path):
    with pytest.raises(Exception) as failed:
        sandbox.files.read(path)
    assert getattr(failed.value, "status_code", 404) == 404


def test_as_the_sandboxes_user(sandbox, folder):
    sandbox.commands.run(f"echo secret > {folder}/closed && chmod 000 {folder}/closed")
    for path in (f"{folder}/closed", "/etc/shadow"):
        with pytest.raises(Exception) as failed:
            sandbox.files.read(path)
        assert getattr(failed.value, "status_code", 403) == 403
    assert not sandbox.files.exists(f"{folder}/nothing")


def test_directories_exist(sandbox, folder):
    assert sandbox.files.exists(folder) and sandbox.files.exists("/app") and not sandbox.files.exists("/nowhere")


@pytest.mark.since(0, 5)
@pytest.mark.parametrize("path", ["../tmp/out-of-home", "../../tmp/out-of-home"])
def test_out_of_the_home_where_the_caller_says_so(sandbox, path):
    sandbox.files.write(path, b"out", allow_unsafe_paths=True)
    assert sandbox.commands.run("cat /tmp/out-of-home").stdout == "out"
    assert sandbox.files.read(path, allow_unsafe_paths=True) == b"out"


@pytest.mark.since(0, 5)
@pytest.mark.parametrize("path", ["../x", "a/../../x"])
def test_the_client_refuses_to_leave(sandbox, path):
    with pytest.raises(ValueError):
        sandbox.files.write(path, b"x")


@pytest.mark.since(1, 0)
def test_streams(sandbox, tmp_path):
    source = tmp_path / "source"
    source.write_bytes(BYTES * 1000)
    with source.open("rb") as f:
        sandbox.files.write("streamed", f)
    with (tmp_path / "back").open("wb") as f:
        assert sandbox.files.read_to("streamed", f) == len(BYTES) * 1000
    assert (tmp_path / "back").read_bytes() == source.read_bytes()
