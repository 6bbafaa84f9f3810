"""Cove as a sandbox provider of Deep Agents Code."""

from __future__ import annotations

import importlib
import sys
import tomllib
import types
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

import cove as package
from cove import Cove

MODULE = "deepagents_code.integrations.sandbox_provider"


@pytest.fixture
def dcode(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """The interface of deepagents-code: the package's own where it is installed, else what Cove uses of it."""
    try:
        return __import__(MODULE, fromlist=["x"])
    except ImportError:
        pass
    stand_in = types.ModuleType(MODULE)
    stand_in.SandboxNotFoundError = type("SandboxNotFoundError", (Exception,), {})
    stand_in.SandboxInstallHint = lambda kind, name: (kind, name)
    stand_in.SandboxProviderMetadata = lambda **told: types.SimpleNamespace(**told)
    for name in ("deepagents_code", "deepagents_code.integrations"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, MODULE, stand_in)
    return stand_in


@pytest.fixture
def provider(dcode: types.ModuleType) -> Iterator[object]:
    from cove.deepagents import CoveProvider

    yield CoveProvider()


def test_the_package_declares_it(dcode: types.ModuleType) -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    module, name = project["entry-points"]["deepagents_code.sandbox_providers"]["cove"].split(":")
    from cove.deepagents import CoveProvider

    assert getattr(importlib.import_module(module), name) is CoveProvider


def test_metadata_needs_no_server_and_no_key(dcode: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    from cove.deepagents import CoveProvider

    monkeypatch.delenv("COVE_URL")
    monkeypatch.delenv("COVE_API_KEY")
    told = CoveProvider().metadata
    assert (told.name, told.supports_sandbox_id, told.supports_snapshot_name) == ("cove", True, True)
    with pytest.raises(package.Invalid, match="COVE_URL"):
        CoveProvider().get_or_create()


def test_a_sandbox_is_made_found_and_ended(provider, dcode: types.ModuleType, cove: Cove) -> None:
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


def test_unknown_arguments_are_refused_before_anything_is_made(provider) -> None:
    with pytest.raises(TypeError, match="colour"):
        provider.get_or_create(colour="red")
    with pytest.raises(TypeError, match="colour"):
        provider.delete(sandbox_id="x", colour="red")


def test_a_snapshot_is_a_template(provider, cove: Cove) -> None:
    first = provider.get_or_create()
    first.execute("echo kept >~/kept.txt")
    name = f"dcode-{uuid.uuid4().hex[:12]}"
    first.sandbox.snapshot(name)
    second = provider.get_or_create(snapshot_name=name)
    try:
        assert second.execute("cat ~/kept.txt").output == "kept\n"
    finally:
        provider.delete(sandbox_id=first.id)
        provider.delete(sandbox_id=second.id)


async def test_async_twins_work(provider, dcode: types.ModuleType) -> None:
    made = await provider.aget_or_create()
    assert (await made.aexecute("echo hi")).output == "hi\n"
    await provider.adelete(sandbox_id=made.id)
    with pytest.raises(dcode.SandboxNotFoundError):
        await provider.aget_or_create(sandbox_id=made.id)


def test_dcodes_own_names_of_the_settings_win(dcode: types.ModuleType, monkeypatch: pytest.MonkeyPatch, cove: Cove) -> None:
    from cove.deepagents import CoveProvider

    monkeypatch.setenv("DEEPAGENTS_CODE_COVE_URL", cove.url)
    monkeypatch.setenv("COVE_URL", "http://127.0.0.1:9")
    with CoveProvider().get_or_create() as made:
        assert made.sandbox.is_active
