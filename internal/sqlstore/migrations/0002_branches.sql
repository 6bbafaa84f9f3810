-- Pause and fork. unspent is nanoseconds, negative for a lifetime without an end.
ALTER TABLE sandboxes ADD COLUMN forked_from TEXT    NOT NULL DEFAULT '';
ALTER TABLE sandboxes ADD COLUMN auto_resume INTEGER NOT NULL DEFAULT 0;
ALTER TABLE sandboxes ADD COLUMN idle_action TEXT    NOT NULL DEFAULT 'kill';
ALTER TABLE sandboxes ADD COLUMN paused_at   INTEGER NOT NULL DEFAULT 0;
ALTER TABLE sandboxes ADD COLUMN unspent     INTEGER NOT NULL DEFAULT 0;
