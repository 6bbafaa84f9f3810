"""Sessions: one sandbox per conversation, pinned by a key."""

from .session_manager import SessionManager, check_key, key_for_thread

__all__ = ["SessionManager", "check_key", "key_for_thread"]
