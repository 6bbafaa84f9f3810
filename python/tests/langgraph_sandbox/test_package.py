"""The package as users meet it: imports, installation, commands, examples, images."""

from __future__ import annotations

import importlib
import os
import pty
import shutil
import signal
import subprocess
import sys
import sysconfig
import uuid
from pathlib import Path

import pytest

from cove import Cove
from cove.langgraph_sandbox import SessionManager

PROJECT = Path(__file__).resolve().parents[2]


def test_S4_2_the_names_of_the_readme_resolve() -> None:
    from cove.langgraph_sandbox import (  # noqa: F401
        Config,
        SessionManager,
        make_code_sandbox_tool,
        make_export_datasets_tool,
        make_list_datasets_tool,
        make_select_dataset_tool,
    )


@pytest.mark.parametrize("name", ["tool_factory", "sandbox", "artifacts", "datasets"])
def test_S4_3_the_submodules_import(name: str) -> None:
    importlib.import_module(f"cove.langgraph_sandbox.{name}")


@pytest.mark.parametrize("name", ["deepagents", "e2b", "otel", "langgraph_sandbox", "checkpoint"])
def test_S4_131_there_are_adapters_for_other_frameworks(name: str) -> None:
    importlib.import_module(f"cove.{name}")


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment that has what this one has, except the package itself, and a copy of the project."""
    root = tmp_path_factory.mktemp("install")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", root / "venv"], check=True)
    site = next((root / "venv" / "lib").iterdir()) / "site-packages"
    (site / "parent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    shutil.copytree(PROJECT, root / "project", ignore=shutil.ignore_patterns("tests", "__pycache__", "build", "*.egg-info"))
    return root


def _inside(fresh: Path, *command: str | Path) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run([fresh / "venv" / "bin" / "python", *command], cwd=fresh, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


CHECK = """
import importlib.metadata, importlib.resources, cove, cove.langgraph_sandbox
assert importlib.metadata.version("cove-sandbox") == cove.__version__
files = importlib.resources.files("cove")
for name in ("py.typed", "setup/files/Dockerfile", "setup/files/example.env", "setup/files/sandbox/README.md",
             "langgraph_sandbox/usage_examples/simple_sandbox.py", "langgraph_sandbox/usage_examples/tmpfs_api.py"):
    assert files.joinpath(name).is_file(), name
names = {e.name for e in importlib.metadata.distribution("cove-sandbox").entry_points}
assert {"cove-chat", "cove-setup", "cove"} <= names, names
print(cove.__file__)
"""


def test_S4_1_S4_9_a_wheel_installs_with_its_examples(fresh: Path) -> None:
    _inside(fresh, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet", "-w", fresh / "dist", fresh / "project")
    wheel = next((fresh / "dist").glob("cove_sandbox-*.whl"))
    _inside(fresh, "-m", "pip", "install", "--no-deps", "--quiet", wheel)
    assert str(fresh / "venv") in _inside(fresh, "-c", CHECK).stdout
    _inside(fresh, "-m", "pip", "uninstall", "--yes", "--quiet", "cove-sandbox")


def test_S4_1_an_editable_install_uses_the_sources(fresh: Path) -> None:
    _inside(fresh, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--quiet", "-e", fresh / "project")
    assert str(fresh / "project") in _inside(fresh, "-c", CHECK).stdout
    _inside(fresh, "-m", "pip", "uninstall", "--yes", "--quiet", "cove-sandbox")


def _run(module: str, *, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    return _python("-m", module, cwd=cwd, **env)


def _example(name: str, **env: str) -> subprocess.CompletedProcess[str]:
    return _python(str(PROJECT.parent / "examples" / "langgraph-sandbox" / name), **env)


def _python(*args: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-W", "ignore", *args], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=1200, cwd=cwd,
                          env=os.environ | {"ANTHROPIC_API_KEY": "", "OPENAI_API_KEY": ""} | env)


def test_S4_4_the_chat_answers_until_bye() -> None:
    ours, theirs = pty.openpty()
    env = os.environ | {"ANTHROPIC_API_KEY": "", "OPENAI_API_KEY": "", "DATASET_ACCESS": "NONE"}
    with subprocess.Popen([sys.executable, "-W", "ignore", "-m", "cove.chat"], stdin=theirs, stdout=theirs, stderr=theirs, env=env) as chat:
        os.close(theirs)
        os.write(ours, b"factorial of 10\nrun x = 20\nrun print(x + 3)\n/bye\n")
        said = b""
        try:
            while chunk := os.read(ours, 4096):
                said += chunk
        except OSError:  # the terminal has ended with the program
            pass
    os.close(ours)
    text = said.decode()
    assert chat.returncode == 0 and "3628800" in text and "23" in text and text.rstrip().endswith("Bye."), text


def test_the_chat_goes_on_after_an_interrupt() -> None:
    env = os.environ | {"ANTHROPIC_API_KEY": "", "OPENAI_API_KEY": "", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen([sys.executable, "-W", "ignore", "-m", "cove.chat", "--model", "fake"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, env=env) as chat:
        assert chat.stdin and chat.stdout
        chat.stdin.write("run x = 5; print('be' + 'gun', flush=True); import time; time.sleep(3600)\n")
        chat.stdin.flush()
        for line in chat.stdout:
            if "begun" in line:
                break
        chat.send_signal(signal.SIGINT)
        rest, _ = chat.communicate("run print('x is', x)\n/bye\n", timeout=600)
    assert chat.returncode == 0 and "Interrupted." in rest and "x is 5" in rest and "Traceback" not in rest, rest


@pytest.mark.parametrize(("settings", "told"), [
    ("COVE_CHAT_MODEL=nobody:knows", "nobody"), ("OPENAI_API_KEY=none # of the project", "openai:gpt-4.1")], ids=["model", "key"])
def test_the_chat_takes_its_model_from_the_settings_of_a_project(server: Cove, tmp_path: Path, settings: str, told: str) -> None:
    (tmp_path / ".env").write_text(f"{settings}\nDATASET_ACCESS=NONE\n")
    before = {s.key for s in server.sessions()}
    done = _run("cove.chat", cwd=tmp_path)
    assert told in done.stdout + done.stderr and "Traceback" not in done.stderr, done
    if done.returncode:  # it is told which package or model there is not, and nothing is left behind
        assert "LangGraph" not in done.stderr and {s.key for s in server.sessions() if s.key.startswith("chat-")} <= before


def test_S4_4_S4_123_the_chat_tells_that_there_is_no_server() -> None:
    done = _run("cove.chat", COVE_URL="http://127.0.0.1:1")
    assert done.returncode == 1 and "cove serve" in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_S4_5_S4_10_setup_writes_a_project(tmp_path: Path) -> None:
    done = _run("cove.setup")
    assert done.returncode == 0 and "cove image build" in done.stdout, done.stderr
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()) == [
        ".env", "Dockerfile", "example.env", "sandbox/README.md", "sandbox/requirements.txt"]


def test_S4_6_setup_keeps_what_its_user_changed(tmp_path: Path) -> None:
    _run("cove.setup")
    (tmp_path / "Dockerfile").write_text("FROM mine\n")
    (tmp_path / ".env").write_text("DATASET_ACCESS=NONE\n")
    (tmp_path / "sandbox" / "notes.txt").write_text("mine\n")
    done = _run("cove.setup")
    assert "Dockerfile has changes of yours and stays; the new one is Dockerfile.new" in done.stdout
    assert (tmp_path / "Dockerfile").read_text() == "FROM mine\n" and "FROM python" in (tmp_path / "Dockerfile.new").read_text()
    assert (tmp_path / ".env").read_text() == "DATASET_ACCESS=NONE\n" and not (tmp_path / ".env.new").exists()
    assert (tmp_path / "sandbox" / "notes.txt").read_text() == "mine\n"


PACKAGES = "numpy, pandas, matplotlib, seaborn, sklearn, skimage, geopandas, shapely, pyarrow, scipy, statsmodels"


def test_S4_7_S4_8_S4_43_S4_44_the_shipped_file_builds_an_image_with_the_packages(tmp_path: Path, server: Cove, key: str) -> None:
    program = os.environ.get("COVE_TEST_BINARY")
    if not program:
        pytest.fail("COVE_TEST_BINARY is not set: the cove program", pytrace=False)
    _run("cove.setup")
    image = f"custom-{uuid.uuid4().hex[:8]}:latest"
    with (tmp_path / "Dockerfile").open("a") as f:
        f.write("ENV MADE_BY=me\n")
    built = subprocess.run([program, "image", "build", "-t", image, "-f", "Dockerfile", "."], capture_output=True, text=True, timeout=4000)
    assert built.returncode == 0, built.stdout[-2000:] + built.stderr[-2000:]
    (tmp_path / ".env").write_text(f"SANDBOX_IMAGE={image}\nDATASET_ACCESS=NONE\n")
    from cove.langgraph_sandbox import Config

    manager = SessionManager.from_config(Config.from_env(".env"))
    manager.start(key)
    out = manager.exec(key, f"import os, sys\nprint(os.environ['MADE_BY'], sys.version_info >= (3, 11), os.getcwd())\nimport {PACKAGES}", timeout=120)
    assert (out["ok"], out["stdout"]) == (True, "me True /session\n"), out
    manager.cove.get_session(key).remove()
    subprocess.run([program, "image", "remove", image], check=True, capture_output=True)


def test_S4_123_a_wrong_image_is_told(key: str) -> None:
    from cove import CoveError

    with pytest.raises(CoveError) as told:
        SessionManager(image="localhost:1/nobody/has-this:1", dataset_access="NONE").start(key)
    assert "has-this" in str(told.value) or "localhost:1" in str(told.value)


def test_S4_121_S4_122_the_simple_example_calculates() -> None:
    done = _example("simple.py")
    assert done.returncode == 0 and "3628800" in done.stdout and "22228104 digits" in done.stdout, done.stdout + done.stderr


def test_S4_121_the_fully_local_example_runs(tmp_path: Path, host_data: Path) -> None:
    (host_data / "table.csv").write_text("a,b\n1,2\n3,4\n")
    done = _example("fully_local.py", DATASET_ACCESS="LOCAL_RO", DATASETS_HOST_RO=str(host_data))
    assert done.returncode == 0 and "2 rows in /data/table.csv" in done.stdout and "plot.png" in done.stdout, done.stdout + done.stderr
    assert len(list((tmp_path / "sessions").glob("*/session.log"))) == 1


def test_S4_121_the_api_example_runs(tmp_path: Path) -> None:
    done = _example("tmpfs_api.py")
    assert done.returncode == 0 and "520000 people" in done.stdout, done.stdout + done.stderr
    exported = next((tmp_path / "exports" / "modified_datasets").iterdir())
    assert exported.read_text().startswith("name,people,km2,density")


def test_S4_130_D17_other_languages_have_kernels(server: Cove) -> None:
    with server.create() as sandbox:
        hello = {"javascript": "console.log('hello')", "typescript": "const a: string = 'hello'; console.log(a)", "bash": "echo hello", "python": "print('hello')"}
        said = {language: sandbox.run(code, kernel=sandbox.start_kernel(language)).stdout for language, code in hello.items()}
        assert said == dict.fromkeys(hello, "hello\n")
