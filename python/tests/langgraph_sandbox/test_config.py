"""Config: what an env file and the environment say."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cove.langgraph_sandbox import Config, DatasetAccess, SessionManager, SessionStorage


def test_S4_11_S4_12_S4_13_S4_14_S4_16_the_defaults(tmp_path: Path) -> None:
    config = Config.from_env()
    assert (config.session_storage, config.dataset_access) == (SessionStorage.TMPFS, DatasetAccess.API)
    assert (config.sessions_root, config.blobstore_dir, config.artifacts_db) == (tmp_path / "sessions", tmp_path / "blobstore", tmp_path / "artifacts.db")
    assert (config.sandbox_image, config.tmpfs_size_mb, config.datasets_host_ro) == ("sandbox:latest", 1024, None)
    assert config.session_dir("a") == tmp_path / "sessions" / "a"


def test_S4_11_S4_14_a_file_names_everything(tmp_path: Path) -> None:
    (tmp_path / "my.env").write_text(
        "# settings\nexport SESSION_STORAGE=bind\nDATASET_ACCESS='none'  # quoted\nSESSIONS_ROOT=/s\nBLOBSTORE_DIR=/b\nARTIFACTS_DB=/a.db\n"
        "SANDBOX_IMAGE=mine:1\nTMPFS_SIZE_MB=64\nCACHE_FILENAME=c.json\nCOVE_API_KEY=se#cret\n")
    config = Config.from_env(tmp_path / "my.env")
    assert config == Config(SessionStorage.BIND, DatasetAccess.NONE, Path("/s"), None, Path("/b"), Path("/a.db"), "c.json", "mine:1", 64,
                            os.environ.get("COVE_URL", ""), "se#cret")
    assert "se#cret" not in repr(config)


@pytest.mark.parametrize("storage", ["TMPFS", "BIND"])
@pytest.mark.parametrize(("access", "name"), [("NONE", "NONE"), ("LOCAL_RO", "LOCAL"), ("API", "API")])
def test_S4_26_the_mode_has_the_name_of_the_table(monkeypatch: pytest.MonkeyPatch, storage: str, access: str, name: str) -> None:
    monkeypatch.setenv("SESSION_STORAGE", storage)
    monkeypatch.setenv("DATASET_ACCESS", access)
    monkeypatch.setenv("DATASETS_HOST_RO", "./d")
    config = Config.from_env()
    assert config.mode_id() == f"{storage}_{name}"
    assert (config.is_bind, config.is_tmpfs) == (storage == "BIND", storage == "TMPFS")
    assert (config.uses_no_datasets, config.uses_local_ro, config.uses_api_staging) == (access == "NONE", access == "LOCAL_RO", access == "API")


def test_S4_13_D11_the_alias_of_the_readme_is_api(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATASET_ACCESS", "API_TMPFS")
    assert Config.from_env().dataset_access is DatasetAccess.API


def test_D11_the_other_name_of_the_database_is_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARTIFACTS_DB_PATH", "/other.db")
    assert Config.from_env().artifacts_db == Path("/other.db")
    monkeypatch.setenv("ARTIFACTS_DB", "/mine.db")
    assert Config.from_env().artifacts_db == Path("/mine.db")


def test_S4_15_S4_88_local_ro_needs_its_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DATASET_ACCESS", "LOCAL_RO")
    with pytest.raises(ValueError, match="DATASETS_HOST_RO"):
        Config.from_env()
    with pytest.raises(ValueError, match="datasets_path"):
        SessionManager(dataset_access="LOCAL_RO")
    monkeypatch.setenv("DATASETS_HOST_RO", "./data")
    assert Config.from_env().datasets_host_ro == tmp_path / "data"
    monkeypatch.setenv("DATASET_ACCESS", "NONE")
    assert Config.from_env().datasets_host_ro is None


@pytest.mark.parametrize("name", ["SESSION_STORAGE", "DATASET_ACCESS"])
def test_S4_17_case_does_not_matter_and_a_bad_value_names_the_good_ones(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, {"SESSION_STORAGE": "bind", "DATASET_ACCESS": "none"}[name])
    Config.from_env()
    monkeypatch.setenv(name, "cloud")
    with pytest.raises(ValueError, match={"SESSION_STORAGE": "TMPFS, BIND", "DATASET_ACCESS": "NONE, LOCAL_RO, API"}[name]):
        Config.from_env()


@pytest.mark.parametrize("key", ["../up", "a/b", "", "/etc", "..", "a\n"])
def test_S4_52_the_directory_of_a_session_is_below_the_root(key: str) -> None:
    with pytest.raises(ValueError, match="session key"):
        Config.from_env().session_dir(key)


@pytest.mark.parametrize("size", ["much", "0", "-1"])
def test_S4_16_a_size_is_a_number(monkeypatch: pytest.MonkeyPatch, size: str) -> None:
    monkeypatch.setenv("TMPFS_SIZE_MB", size)
    with pytest.raises(ValueError, match="TMPFS_SIZE_MB"):
        Config.from_env()


def test_S4_18_a_file_wins_and_does_not_leak_into_the_next_config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SANDBOX_IMAGE", "of-the-environment")
    (tmp_path / "one.env").write_text("SANDBOX_IMAGE=of-the-file\nTMPFS_SIZE_MB=64\n")
    (tmp_path / "two.env").write_text("DATASET_ACCESS=NONE\n")
    assert Config.from_env(tmp_path / "one.env").sandbox_image == "of-the-file"
    two = Config.from_env(tmp_path / "two.env")
    assert (two.sandbox_image, two.tmpfs_size_mb) == ("of-the-environment", 1024)
    assert "TMPFS_SIZE_MB" not in os.environ


@pytest.mark.parametrize(("size", "mb"), [(512, 512), ("512", 512), ("512m", 512), ("2g", 2048), ("1GB", 1024), ("2048k", 2)])
def test_S4_32_the_size_is_a_number_of_mb_or_text(size: int | str, mb: int) -> None:
    assert SessionManager(tmpfs_size=size).size_bytes == mb << 20


def test_S4_32_a_size_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="tmpfs_size"):
        SessionManager(tmpfs_size="lots")
