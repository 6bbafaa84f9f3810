"""Sessions: one sandbox per conversation, pinned by a key."""

from ..._threads import check_key
from .session_manager import SessionManager, key_for_thread

__all__ = ["SessionManager", "check_key", "key_for_thread"]
