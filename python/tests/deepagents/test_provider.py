"""Cove as a sandbox provider of Deep Agents Code, whose published package drives it: tests/dcode has its lock."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
import types
import uuid
from pathlib import Path

import pytest

import cove as package
from cove import Cove
from cove.deepagents import CoveProvider, CoveSandbox

PYTHON = Path(__file__).parents[2]
METADATA = "import sys; from setuptools import build_meta as b; b.prepare_metadata_for_build_wheel(sys.argv[1])"


def _of_dcode(module: str) -> types.ModuleType:
    try:
        return importlib.import_module(f"deepagents_code.integrations.{module}")
    except ImportError as err:
        pytest.fail(f"{err}: these tests need the packages of tests/dcode/requirements.lock", pytrace=False)


@pytest.fixture
def dcode() -> types.ModuleType:
    """The interface that deepagents-code asks of a provider."""
    return _of_dcode("sandbox_provider")


@pytest.fixture
def provider(dcode: types.ModuleType) -> CoveProvider:
    return CoveProvider()


@pytest.fixture(scope="module")
def metadata(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What an installation of the package tells others: its entry points among it."""
    source, out = tmp_path_factory.mktemp("source") / "python", tmp_path_factory.mktemp("metadata")
    shutil.copytree(PYTHON, source, ignore=shutil.ignore_patterns("tests", "__pycache__", "*.egg-info", "build"))
    subprocess.run([sys.executable, "-c", METADATA, str(out)], cwd=source, check=True, capture_output=True, timeout=1200)
    return out


@pytest.fixture
def factory(metadata: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """What makes the sandboxes of `dcode --sandbox NAME`, on a machine where Cove's package is installed and dcode has no settings."""
    monkeypatch.syspath_prepend(str(metadata))
    monkeypatch.setattr(_of_dcode("sandbox_config"), "DEFAULT_CONFIG_PATH", tmp_path / "config.toml")
    return _of_dcode("sandbox_factory")


@pytest.fixture
def snapshot(cove: Cove) -> str:
    """The name of a snapshot that has ~/kept.txt."""
    name = f"dcode-{uuid.uuid4().hex[:12]}"
    with CoveSandbox.create(cove=cove) as first:
        first.execute("echo kept >~/kept.txt")
        first.sandbox.snapshot(name)
    return name


def test_dcode_finds_the_provider_by_its_entry_point(factory: types.ModuleType) -> None:
    factory.verify_sandbox_deps("cove")
    with factory.create_sandbox("cove") as made:
        assert made.execute("pwd").output.strip() == factory.get_default_working_dir("cove")
        with factory.create_sandbox("cove", sandbox_id=made.id) as same:
            assert same.execute("echo same").output == "same\n"
        assert made.sandbox.is_active, "dcode ends what it made, and only that"
    assert not made.sandbox.is_active


def test_dcode_starts_from_a_snapshot(factory: types.ModuleType, snapshot: str) -> None:
    with factory.create_sandbox("cove", snapshot_name=snapshot) as made:
        assert made.execute("cat ~/kept.txt").output == "kept\n"


def test_metadata_needs_no_server_and_no_key(dcode: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COVE_URL")
    monkeypatch.delenv("COVE_API_KEY")
    told = CoveProvider().metadata
    assert (told.name, told.supports_sandbox_id, told.supports_snapshot_name) == ("cove", True, True)
    with pytest.raises(package.Invalid, match="COVE_URL"):
        CoveProvider().get_or_create()


def test_a_sandbox_is_made_found_and_ended(provider: CoveProvider, dcode: types.ModuleType, cove: Cove) -> None:
    made = provider.get_or_create()
    try:
        assert made.execute("pwd").output.strip() == provider.metadata.working_dir
        assert provider.get_or_create(sandbox_id=made.id).execute("echo same").output == "same\n"
    finally:
        provider.delete(sandbox_id=made.id)
        provider.delete(sandbox_id=made.id)
    with pytest.raises(dcode.SandboxNotFoundError):
        provider.get_or_create(sandbox_id=made.id)
    with pytest.raises(dcode.SandboxNotFoundError):
        provider.get_or_create(sandbox_id="sb-none")


def test_unknown_arguments_are_refused_before_anything_is_made(provider: CoveProvider) -> None:
    with pytest.raises(TypeError, match="colour"):
        provider.get_or_create(colour="red")
    with pytest.raises(TypeError, match="colour"):
        provider.delete(sandbox_id="x", colour="red")


@pytest.mark.parametrize("name", ["snapshot", "snapshot_name", "template"])
def test_a_snapshot_is_a_template_by_each_of_its_names(provider: CoveProvider, snapshot: str, name: str) -> None:
    with provider.get_or_create(**{name: snapshot}) as made:
        assert made.execute("cat ~/kept.txt").output == "kept\n"


async def test_async_twins_work(provider: CoveProvider, dcode: types.ModuleType) -> None:
    made = await provider.aget_or_create()
    assert (await made.aexecute("echo hi")).output == "hi\n"
    await provider.adelete(sandbox_id=made.id)
    with pytest.raises(dcode.SandboxNotFoundError):
        await provider.aget_or_create(sandbox_id=made.id)


def test_dcodes_own_names_of_the_settings_win(dcode: types.ModuleType, monkeypatch: pytest.MonkeyPatch, cove: Cove) -> None:
    monkeypatch.setenv("DEEPAGENTS_CODE_COVE_URL", cove.url)
    monkeypatch.setenv("COVE_URL", "http://127.0.0.1:9")
    with CoveProvider().get_or_create() as made:
        assert made.sandbox.is_active
