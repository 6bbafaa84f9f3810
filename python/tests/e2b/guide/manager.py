"""Sandboxes by session, each for so many minutes and then another."""

from datetime import datetime, timedelta

from cove.e2b import CodeInterpreter


class Manager:
    def __init__(self, max_age_minutes=30):
        self.max_age = timedelta(minutes=max_age_minutes)
        self.born, self.kept = {}, {}

    def get_or_create(self, session_id):
        now = datetime.now()
        if now - self.born.get(session_id, now) > self.max_age:
            self.drop(session_id)
        if session_id not in self.kept:
            self.kept[session_id], self.born[session_id] = CodeInterpreter(), now
        return self.kept[session_id]

    def drop(self, session_id):
        del self.born[session_id]
        self.kept.pop(session_id).close()

    def cleanup_all(self):
        for session_id in list(self.kept):
            self.drop(session_id)
