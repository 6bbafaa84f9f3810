-- Servers that share this database, the oldest first by seq. A row is there until its server leaves or is taken for dead; seen is by
-- the database's clock.
CREATE TABLE servers (
    seq  INTEGER PRIMARY KEY AUTOINCREMENT,
    id   TEXT    NOT NULL UNIQUE,
    url  TEXT    NOT NULL,
    seen INTEGER NOT NULL
);
-- What all servers of this database know and nobody else does.
CREATE TABLE secrets (
    name  TEXT NOT NULL PRIMARY KEY,
    value BLOB NOT NULL
) WITHOUT ROWID;
-- The server that a sandbox belongs to; empty: to the only one that there is.
ALTER TABLE sandboxes ADD COLUMN server TEXT NOT NULL DEFAULT '';
CREATE INDEX sandboxes_server ON sandboxes (server) WHERE state <> 'ended';
