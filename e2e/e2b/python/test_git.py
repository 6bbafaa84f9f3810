"""The SDK's git helpers, which are commands in the sandbox."""

import pytest

from e2b import GitUpstreamException


@pytest.fixture(scope="module")
def daemon(sandbox):
    """A bare repository that git serves inside the sandbox."""
    sandbox.commands.run("mkdir -p /tmp/git && git init --bare -b main /tmp/git/origin.git && touch /tmp/git/origin.git/git-daemon-export-ok")
    sandbox.commands.run(
        "git daemon --reuseaddr --base-path=/tmp/git --enable=receive-pack --listen=127.0.0.1 --port=9418", background=True, timeout=0
    )
    sandbox.commands.run("for i in $(seq 1200); do ss -Htln sport = :9418 | grep -q . && exit 0; sleep 0.1; done; exit 1", timeout=0)
    return "git://127.0.0.1/origin.git"


@pytest.fixture
def repo(sandbox, folder):
    path = f"{folder}/repo"
    sandbox.git.init(path, initial_branch="main")
    sandbox.git.configure_user("Ada", "ada@example.com")
    sandbox.files.write(f"{path}/a.txt", "one\n")
    sandbox.git.add(path)
    sandbox.git.commit(path, "first")
    return path


@pytest.mark.proves("git.init", "git.add", "git.commit", "git.status", "git.configure_user")
def test_a_repository_is_made_and_filled(sandbox, repo):
    clean = sandbox.git.status(repo)
    assert clean.is_clean and clean.current_branch == "main"
    sandbox.files.write(f"{repo}/b.txt", "two\n")
    dirty = sandbox.git.status(repo)
    assert dirty.has_untracked and [f.name for f in dirty.file_status] == ["b.txt"]


@pytest.mark.proves("git.branches", "git.create_branch", "git.checkout_branch", "git.delete_branch")
def test_branches(sandbox, repo):
    sandbox.git.create_branch(repo, "side")
    assert sandbox.git.branches(repo).current_branch == "side"
    sandbox.git.checkout_branch(repo, "main")
    sandbox.git.delete_branch(repo, "side")
    assert sandbox.git.branches(repo).branches == ["main"]


@pytest.mark.proves("git.reset", "git.restore")
def test_changes_are_taken_back(sandbox, repo):
    sandbox.files.write(f"{repo}/a.txt", "changed\n")
    sandbox.git.add(repo)
    sandbox.git.restore(repo, ["a.txt"], staged=True)
    assert not sandbox.git.status(repo).has_staged
    sandbox.git.reset(repo, mode="hard")
    assert sandbox.files.read(f"{repo}/a.txt") == "one\n"


@pytest.mark.proves("git.remote_add", "git.remote_get", "git.push", "git.pull", "git.clone")
def test_to_and_from_a_remote(sandbox, repo, folder, daemon):
    with pytest.raises(GitUpstreamException):
        sandbox.git.pull(repo)
    sandbox.git.remote_add(repo, "origin", daemon)
    assert sandbox.git.remote_get(repo, "origin") == daemon
    sandbox.git.push(repo, remote="origin", branch="main")
    sandbox.git.clone(daemon, path=f"{folder}/copy")
    assert sandbox.files.read(f"{folder}/copy/a.txt") == "one\n"
    sandbox.git.pull(f"{folder}/copy")


@pytest.mark.proves("git.set_config", "git.get_config", "git.dangerously_authenticate")
def test_configuration(sandbox, repo):
    sandbox.git.set_config("pull.rebase", "true", scope="local", path=repo)
    assert sandbox.git.get_config("pull.rebase", scope="local", path=repo) == "true"
    assert sandbox.git.get_config("no.such", scope="local", path=repo) is None
    sandbox.git.dangerously_authenticate("someone", "a-token", host="git.example.com")
    assert "someone:a-token@git.example.com" in sandbox.files.read("/home/user/.git-credentials")
