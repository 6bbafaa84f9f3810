-- What dialects keep with a sandbox and beside it, and what happens at the end of a lifetime. resume_lifetime is nanoseconds.
ALTER TABLE sandboxes ADD COLUMN annotations     TEXT    NOT NULL DEFAULT 'null'; -- JSON
ALTER TABLE sandboxes ADD COLUMN deadline_action TEXT    NOT NULL DEFAULT 'kill';
ALTER TABLE sandboxes ADD COLUMN cold_pause      INTEGER NOT NULL DEFAULT 0;
ALTER TABLE sandboxes ADD COLUMN cold            INTEGER NOT NULL DEFAULT 0;
ALTER TABLE sandboxes ADD COLUMN resume_lifetime INTEGER NOT NULL DEFAULT 0;

-- A listing goes by time of creation.
DROP INDEX sandboxes_tenant;
CREATE INDEX sandboxes_created ON sandboxes (tenant, created_at, id);

CREATE TABLE documents (
    tenant  TEXT    NOT NULL,
    kind    TEXT    NOT NULL,
    id      TEXT    NOT NULL,
    body    BLOB    NOT NULL,
    created INTEGER NOT NULL,
    updated INTEGER NOT NULL,
    PRIMARY KEY (tenant, kind, id)
) WITHOUT ROWID;
