"""Datasets: which a session has, and the file that tells it."""

from .cache import (
    DatasetStatus,
    add_entry,
    clear_cache,
    discover,
    get_entry_status,
    is_cached,
    read_entries,
    read_ids,
    read_pending_ids,
    update_entry_status,
    write_entries,
    write_ids,
)

__all__ = ["DatasetStatus", "add_entry", "clear_cache", "discover", "get_entry_status", "is_cached", "read_entries", "read_ids",
           "read_pending_ids", "update_entry_status", "write_entries", "write_ids"]
