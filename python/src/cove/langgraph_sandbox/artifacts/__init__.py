"""Artifacts: the files that runs left, on the server and as copies on this host."""

from .reader import fetch_artifact_urls, get_metadata, load_csv, load_parquet, read_bytes, read_text
from .store import ArtifactStore, descriptor

__all__ = ["ArtifactStore", "descriptor", "fetch_artifact_urls", "get_metadata", "load_csv", "load_parquet", "read_bytes", "read_text"]
