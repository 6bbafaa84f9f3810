"""Building templates with the SDK's builder."""

import os
import time

import pytest
from conftest import LIFETIME

from e2b import (
    BuildException,
    CommandExitException,
    InvalidArgumentException,
    PtySize,
    Sandbox,
    Template,
    TemplateException,
    wait_for_file,
    wait_for_port,
)


@pytest.fixture
def built(tag):
    """Builds templates and takes them away after the test."""
    ids = []

    def build(template, name=tag, **kw):
        info = Template.build(template, name, **kw)
        ids.append(info.template_id)
        return info

    yield build
    for template_id in set(ids):
        Sandbox.delete_snapshot(template_id)  # the SDK has no other call for DELETE /templates/{id}


@pytest.mark.proves("Template.build", "Template.run_cmd", "Template.set_envs", "Template.set_workdir", "Template.from_template")
def test_steps_make_a_template(built, make, tag):
    logs = []
    template = (
        Template()
        .from_template("base")
        .set_envs({"WORD": "built in"})
        .run_cmd("echo one > /home/user/one && whoami > /home/user/who")
        .run_cmd("echo two > /two && whoami > /two.who", user="root")
        .set_workdir("/srv/app")
        .run_cmd("pwd > where && echo $WORD > word")
    )
    info = built(template, on_build_logs=logs.append)
    assert info.template_id and info.build_id and info.name == tag
    assert any("echo one" in entry.message for entry in logs)
    sbx = make(tag)
    assert sbx.files.read("/home/user/one") == "one\n" and sbx.files.read("/home/user/who") == "user\n"
    assert sbx.files.read("/two.who", user="root") == "root\n"
    assert sbx.files.read("/srv/app/where") == "/srv/app\n" and sbx.files.read("/srv/app/word") == "built in\n"
    assert sbx.commands.run("echo $WORD; pwd").stdout == "built in\n/srv/app\n"
    assert sbx.get_info().name == tag
    assert make(info.template_id).files.exists("/two")


@pytest.mark.proves("Template.copy", "Template.copy_items")
def test_files_are_copied_in(built, make, tag, tmp_path):
    (tmp_path / "app" / "sub").mkdir(parents=True)
    (tmp_path / "app" / "main.py").write_text("print('main')")
    (tmp_path / "app" / "sub" / "data.txt").write_text("data")
    (tmp_path / "run.sh").write_text("#!/bin/sh\necho ran\n")
    template = (
        Template(file_context_path=str(tmp_path))
        .from_template("base")
        .copy("app", "/opt/app")
        .copy("run.sh", "bin/", mode=0o755)
        .copy_items([{"src": "run.sh", "dest": "/opt/as-root.sh", "user": "root", "mode": 0o700}])
    )
    built(template)
    sbx = make(tag)
    assert sbx.files.read("/opt/app/main.py") == "print('main')"
    assert sbx.files.read("/opt/app/sub/data.txt") == "data"
    assert sbx.commands.run("/home/user/bin/run.sh").stdout == "ran\n"
    info = sbx.files.get_info("/opt/as-root.sh")
    assert (info.owner, info.mode) == ("root", 0o700)


@pytest.mark.proves("Template.set_user", "Template.make_dir", "Template.make_symlink", "Template.remove", "Template.rename")
def test_the_small_steps(built, make, tag):
    template = (
        Template()
        .from_template("base")
        .make_dir("/home/user/a", mode=0o700)
        .run_cmd("echo x > a/f")
        .rename("/home/user/a/f", "/home/user/a/g")
        .make_symlink("/home/user/a/g", "/home/user/link")
        .run_cmd("touch gone")
        .remove("/home/user/gone")
        .set_user("root")
        .run_cmd("whoami > /by")
        .set_user("user")
    )
    built(template)
    sbx = make(tag)
    assert sbx.files.read("link") == "x\n"
    assert not sbx.files.exists("gone")
    assert sbx.files.get_info("a").mode == 0o700
    assert sbx.files.read("/by") == "root\n"


@pytest.mark.proves("Template.set_start_cmd", "Template.set_ready_cmd")
def test_the_start_command_runs_in_every_sandbox(built, make, tag, wire):
    template = (
        Template()
        .from_template("base")
        .run_cmd("mkdir -p site && echo hello > site/index.html")
        .set_start_cmd("cd /home/user/site && python3 -m http.server 8080", wait_for_port(8080))
    )
    built(template)
    for _ in range(2):
        sbx = make(tag)
        assert wire.data("GET", sbx.sandbox_id, 8080, "/").text == "hello\n"
    ready = Template().from_template("base").run_cmd("touch /tmp/ok").set_ready_cmd(wait_for_file("/tmp/ok"))
    built(ready, name=tag + "b")


@pytest.mark.proves("Template.build", "Template.skip_cache")
def test_what_was_built_before_is_not_built_again(built, make, tag):
    def template(base=None):
        return (base or Template()).from_template("base").run_cmd("date +%s%N > /home/user/stamp")

    def stamp():
        sbx = make(tag)
        return sbx.files.read("stamp")

    first = built(template())
    one = stamp()
    second = built(template())
    assert second.template_id == first.template_id and second.build_id != first.build_id
    assert stamp() == one
    built(template(), skip_cache=True)
    assert stamp() != one
    two = stamp()
    built(template(Template().skip_cache()))
    assert stamp() != two


@pytest.mark.proves("Template.build_in_background", "Template.get_build_status")
def test_a_build_is_followed_from_afar(built, tag):
    template = Template().from_template("base").run_cmd("echo from afar")
    info = Template.build_in_background(template, tag)
    status = Template.get_build_status(info)
    assert status.build_id == info.build_id and status.template_id == info.template_id
    end = time.monotonic() + 600
    entries = []
    while True:
        status = Template.get_build_status(info, logs_offset=len(entries))
        entries += status.log_entries
        if status.status.value in ("ready", "error"):
            break
        assert time.monotonic() < end
        time.sleep(0.2)
    assert status.status.value == "ready"
    assert any("from afar" in e.message for e in entries)
    Sandbox.delete_snapshot(info.template_id)


@pytest.mark.proves("Template.exists", "Template.alias_exists")
def test_a_name_exists_or_not(built, tag):
    assert Template.exists(tag) is False
    built(Template().from_template("base").run_cmd("true"))
    assert Template.exists(tag) is True
    assert Template.alias_exists(tag) is True
    assert Template.exists("base") is True


@pytest.mark.proves("Template.assign_tags", "Template.get_tags", "Template.remove_tags")
def test_tags_name_builds(built, make, tag):
    first = built(Template().from_template("base").run_cmd("echo 1 > v"), name=f"{tag}:v1")
    second = built(Template().from_template("base").run_cmd("echo 2 > v"), name=tag, tags=["v2", "latest"])
    assert first.template_id == second.template_id
    assert make(f"{tag}:v1").files.read("v") == "1\n"
    assert make(f"{tag}:v2").files.read("v") == "2\n"
    assigned = Template.assign_tags(f"{tag}:v1", ["stable", "old"])
    assert assigned.build_id == first.build_id and set(assigned.tags) >= {"stable", "old"}
    assert make(f"{tag}:stable").files.read("v") == "1\n"
    tags = {t.tag: t.build_id for t in Template.get_tags(tag)}
    assert tags["stable"] == tags["v1"] == first.build_id and tags["v2"] == second.build_id
    Template.remove_tags(tag, "old")
    assert "old" not in [t.tag for t in Template.get_tags(tag)]
    with pytest.raises(Exception, match="404"):
        make(f"{tag}:old")


@pytest.mark.proves("Template.get_tags", "Template.assign_tags")
def test_what_everybody_has_has_one_tag(make, tag):
    assert [t.tag for t in Template.get_tags("base")] == ["default"]
    assert make("base:default").is_running()
    with pytest.raises(Exception, match="404.*tag 'v1' does not exist"):
        make("base:v1")
    with pytest.raises(BuildException, match="tag 'v1' does not exist"):
        Template.build(Template().from_template("base:v1"), tag)
    with pytest.raises(TemplateException, match="403"):
        Template.assign_tags("base", "mine")


@pytest.mark.proves("Template.build")
def test_a_failing_step_is_told_with_its_words(tag):
    with pytest.raises(BuildException, match="exit|status|3"):
        Template.build(Template().from_template("base").run_cmd("echo doomed; exit 3"), tag)
    with pytest.raises(
        BuildException, match="failed to run command 'whoami': command failed: unauthenticated: invalid username: 'root123'"
    ):
        Template.build(Template().from_template("base").run_cmd("whoami", user="root123"), tag)


REGISTRY = os.environ.get("E2B_SUITE_REGISTRY", "")  # the open one, and below /private the one with a password


@pytest.mark.proves("Template.from_image")
def test_an_image_of_a_registry(built, make, tag):
    built(Template().from_image(f"{REGISTRY}/bash:1").run_cmd("whoami > who; pwd >> who; sudo whoami >> who"))
    sbx = make(tag)
    assert sbx.files.read("who") == "user\n/home/user\nroot\n"
    assert sbx.commands.run("cat /etc/made-by; echo $FROM_IMAGE; sudo id -u; pwd").stdout == "the test\nyes\n0\n/home/user\n"
    built(Template().from_image(f"{REGISTRY}/bash:1").run_cmd("whoami > who; pwd >> who; sudo whoami >> who").run_cmd("echo more > more"), name=tag + "b")
    assert make(tag + "b").files.read("more") == "more\n"


@pytest.mark.proves("Template.from_image", "Template.from_dockerfile")
def test_a_dockerfile_on_an_image_of_a_registry(built, make, tag):
    built(Template().from_dockerfile(f"FROM {REGISTRY}/bash:1\nENV WORD=w\nWORKDIR /app\nRUN echo $WORD > said\n"))
    assert make(tag).files.read("/app/said", user="root") == "w\n"


@pytest.mark.proves("Template.from_image")
def test_an_image_behind_a_password(built, make, tag):
    name = f"{REGISTRY}/private/bash-{tag}:1"
    user, password = os.environ["E2B_SUITE_REGISTRY_USER"], os.environ["E2B_SUITE_REGISTRY_PASSWORD"]
    for login in ({}, {"username": user, "password": "wrong-" + tag}):
        with pytest.raises(BuildException, match="a login is needed|they are wrong") as caught:
            Template.build(Template().from_image(name, **login).run_cmd("true"), tag)
        assert "wrong-" + tag not in str(caught.value)
    logs = []
    built(Template().from_image(name, username=user, password=password).run_cmd("cat /etc/made-by > made"), on_build_logs=logs.append)
    assert any(f"Pulling image {name}" in entry.message for entry in logs)
    assert not any(password in entry.message for entry in logs)
    assert make(tag).files.read("made") == "the test\n"


@pytest.mark.proves("Template.from_image", "Template.copy", "Template.set_start_cmd", "Template.set_ready_cmd")
def test_an_image_without_bash_is_built_by_sh(built, make, tag, tmp_path, wire):
    (tmp_path / "app" / "sub").mkdir(parents=True)
    (tmp_path / "app" / "sub" / "data").write_text("data\n")
    (tmp_path / "app" / "link").symlink_to("sub/data")
    os.link(tmp_path / "app" / "sub" / "data", tmp_path / "app" / "twin")
    template = (
        Template(file_context_path=str(tmp_path))
        .from_image(f"{REGISTRY}/busybox:1")
        .set_envs({"WORD": "at $HOME", "PATH": "/opt/bin:/usr/bin:$PATH"})
        .run_cmd("echo $0 $WORD > said; whoami >> said; pwd >> said; sudo whoami >> said; echo $PATH >> said")
        .run_cmd("whoami > /by", user="root")
        .copy("app", "/opt/app", mode=0o750)
        .set_user("bob")
        .set_workdir("/srv/deep/app")
        .run_cmd("id -un > who; echo $SHELL >> who")
        .set_start_cmd("echo hello > /tmp/index.html; exec httpd -f -p 8080 -h /tmp", wait_for_file("/tmp/index.html"))
    )
    built(template)
    sbx = make(tag)
    assert sbx.files.read("/home/user/said") == "/bin/sh at /home/user\nuser\n/home/user\nroot\n/opt/bin:/usr/bin:/bin\n"
    assert sbx.files.read("/by", user="root") == "root\n"
    assert sbx.files.read("/srv/deep/app/who") == "bob\n/bin/sh\n"
    found = sbx.commands.run("stat -c '%n %U:%G %a %h' /srv/deep /opt/app /opt/app/* /usr/local /code; cat /opt/app/link", user="root").stdout
    assert found.splitlines() == [
        "/srv/deep bob:bob 755 3",
        "/opt/app user:user 755 3",
        "/opt/app/link user:user 777 1",
        "/opt/app/sub user:user 750 2",
        "/opt/app/twin user:user 750 2",
        "/usr/local root:root 777 2",
        "/code root:root 777 2",
        "data",
    ]
    assert sbx.commands.run("id -un; pwd; sudo id -u").stdout == "bob\n/srv/deep/app\n0\n"
    assert wire.data("GET", sbx.sandbox_id, 8080, "/").text == "hello\n"
    built(Template().from_template(tag).run_cmd("cat who > again"), name=tag + "b")
    assert make(tag + "b").files.read("/srv/deep/app/again") == "bob\n/bin/sh\n"


@pytest.mark.proves("Template.from_image", "Template.copy", "Template.set_user", "Template.set_workdir", "Template.set_envs")
def test_an_image_without_a_shell_takes_files_and_settings(built, make, tag, tmp_path):
    (tmp_path / "a").write_text("a\n")

    def template():
        return (
            Template(file_context_path=str(tmp_path))
            .from_image(f"{REGISTRY}/scratch:1")
            .set_envs({"WORD": "$HOME/w"})
            .copy("a", "/data/sub/")
            .set_user("bob")
            .set_workdir("/srv/app")
            .copy("a", "b")
        )

    built(template())
    sbx = make(tag)
    assert sbx.files.read("/data/sub/a") == "a\n" and sbx.files.read("/srv/app/b") == "a\n"
    # The image has no names, not even root's.
    owners = [sbx.files.get_info(p).owner for p in ("/data", "/data/sub", "/data/sub/a", "/srv/app", "/srv/app/b", "/home/bob")]
    assert owners == ["0", "user", "user", "bob", "bob", "bob"]
    with pytest.raises(InvalidArgumentException, match="/bin/bash: no such file"):
        sbx.commands.run("true")
    for more in (template().run_cmd("true"), template().set_start_cmd("true", "true")):
        with pytest.raises(BuildException, match="neither /bin/bash nor /bin/sh"):
            Template.build(more, tag + "b")


@pytest.mark.proves("Sandbox.connect", "commands.run", "pty.create")
def test_an_image_without_bash_runs_commands_all_the_same(wire):
    """So does a sandbox that Cove's own API has made of it."""
    body = {"image": f"{REGISTRY}/busybox:1", "timeout_seconds": LIFETIME}
    made = wire.api("POST", "/cove/v1/sandboxes", json=body)
    assert made.status_code == 201, made.text
    with Sandbox.connect(made.json()["id"], timeout=LIFETIME) as sbx:
        assert sbx.commands.run("echo $0 $WORD", envs={"WORD": "w"}).stdout == "/bin/sh w\n"
        with pytest.raises(CommandExitException) as failed:
            sbx.commands.run("echo no >&2; exit 4")
        assert (failed.value.exit_code, failed.value.stderr) == (4, "no\n")
        terminal = sbx.pty.create(PtySize(rows=10, cols=40))
        sbx.pty.send_stdin(terminal.pid, b"stty size; exit\n")
        seen = []
        terminal.wait(on_pty=seen.append)
        assert b"10 40" in b"".join(seen)


@pytest.mark.proves("errors: images")
@pytest.mark.parametrize(
    ("image", "words"),
    [
        ("registry.invalid/no/such:image", "registry.invalid"),
        ("{r}/no/such:image", "no/such"),
        ("{r}/broken:1", "digest"),
        ("{r}/hostile:1", "layer"),
        ("{r}/foreign:1", "linux/"),
        ("{r}/scratch:1", "has neither /bin/bash nor /bin/sh"),
        ("not an image", "name of an image"),
    ],
)
def test_an_image_that_cannot_be_had_is_told(tag, image, words):
    with pytest.raises(BuildException, match=words):
        Template.build(Template().from_image(image.format(r=REGISTRY)).run_cmd("true"), tag)


@pytest.mark.proves("Template.from_template", "Sandbox.create_snapshot")
def test_a_template_of_a_snapshot(built, make, tag):
    sbx = make()
    sbx.files.write("kept", "1\n")
    snapshot = sbx.create_snapshot(name=tag + "s")
    built(Template().from_template(tag + "s").run_cmd("cat kept > seen"))
    assert Sandbox.delete_snapshot(snapshot.snapshot_id)
    assert make(tag).files.read("seen") == "1\n"  # what was built from it stays
    assert not Sandbox.delete_snapshot(snapshot.snapshot_id)


@pytest.mark.proves("Template.from_template")
def test_a_template_of_a_template(built, make, tag):
    built(Template().from_template("base").run_cmd("echo 1 > a"))
    built(Template().from_template(tag).run_cmd("echo 2 > b"), name=tag + "b")
    sbx = make(tag + "b")
    assert (sbx.files.read("a"), sbx.files.read("b")) == ("1\n", "2\n")
    with pytest.raises((BuildException, TemplateException)):
        Template.build(Template().from_template("no-such-template").run_cmd("true"), tag + "c")


@pytest.mark.proves("Template.from_base_image", "Template.from_dockerfile")
def test_a_dockerfile_on_the_base_image(built, make, tag):
    dockerfile = "FROM e2bdev/base\nENV GREETING=hi\nWORKDIR /app\nRUN echo $GREETING > said\n"
    built(Template().from_dockerfile(dockerfile))
    assert make(tag).files.read("/app/said", user="root") == "hi\n"
    built(Template().from_base_image().run_cmd("touch here"), name=tag + "b")


@pytest.mark.proves("Template.to_json", "Template.to_dockerfile")
def test_a_template_is_written_down_without_a_server():
    template = Template().from_template("base").run_cmd("true")
    assert '"fromTemplate"' in Template.to_json(template)
    assert "RUN true" in Template.to_dockerfile(Template().from_image("debian").run_cmd("true"))


@pytest.mark.parametrize("name", ["Upper Case", "a/b/c:d", "", "x" * 300])
@pytest.mark.proves("Template.build")
def test_a_bad_name_is_refused(name):
    with pytest.raises(Exception):
        Template.build(Template().from_template("base").run_cmd("true"), name)


@pytest.mark.proves("Template.build")
def test_size_is_what_was_asked_for(built, make, tag):
    built(Template().from_template("base").run_cmd("true"), cpu_count=1, memory_mb=512)
    info = make(tag, timeout=LIFETIME).get_info()
    assert (info.cpu_count, info.memory_mb) == (1, 512)
