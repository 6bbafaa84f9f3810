-- Times are microseconds since 1970, 0 for none.
CREATE TABLE sandboxes (
    seq             INTEGER PRIMARY KEY AUTOINCREMENT, -- the order of a listing; never used again
    id              TEXT    NOT NULL UNIQUE,
    tenant          TEXT    NOT NULL,
    template        TEXT    NOT NULL,
    template_digest TEXT    NOT NULL,
    key             TEXT    NOT NULL,
    idempotency_key TEXT    NOT NULL,
    spec_digest     TEXT    NOT NULL,
    boot_id         TEXT    NOT NULL,
    state           TEXT    NOT NULL,
    created_at      INTEGER NOT NULL,
    started_at      INTEGER NOT NULL,
    deadline        INTEGER NOT NULL,
    ended_at        INTEGER NOT NULL,
    last_used       INTEGER NOT NULL,
    idle_timeout    INTEGER NOT NULL, -- nanoseconds
    limits          TEXT    NOT NULL, -- JSON, like the next two and usage
    metadata        TEXT    NOT NULL,
    network         TEXT    NOT NULL,
    storage         TEXT    NOT NULL,
    cause           TEXT    NOT NULL,
    cause_message   TEXT    NOT NULL,
    usage           TEXT    NOT NULL
);
CREATE INDEX sandboxes_tenant ON sandboxes (tenant, seq);
CREATE INDEX sandboxes_living ON sandboxes (seq) WHERE state <> 'ended';
CREATE INDEX sandboxes_ended ON sandboxes (ended_at) WHERE state = 'ended';
CREATE UNIQUE INDEX sandboxes_key ON sandboxes (tenant, key) WHERE key <> '' AND state <> 'ended';
CREATE UNIQUE INDEX sandboxes_idempotency ON sandboxes (tenant, idempotency_key) WHERE idempotency_key <> '' AND state <> 'ended';

CREATE TABLE events (
    seq      INTEGER PRIMARY KEY AUTOINCREMENT,
    sandbox  TEXT    NOT NULL,
    tenant   TEXT    NOT NULL,
    type     TEXT    NOT NULL,
    at       INTEGER NOT NULL,
    deadline INTEGER NOT NULL,
    cause    TEXT    NOT NULL,
    message  TEXT    NOT NULL
);
CREATE INDEX events_tenant ON events (tenant, seq);
CREATE INDEX events_sandbox ON events (sandbox, seq);

CREATE TABLE keys (
    id         TEXT    NOT NULL PRIMARY KEY,
    tenant     TEXT    NOT NULL,
    name       TEXT    NOT NULL,
    hash       TEXT    NOT NULL UNIQUE,
    prefix     TEXT    NOT NULL,
    admin      INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    revoked_at INTEGER NOT NULL,
    last_used  INTEGER NOT NULL
);
CREATE INDEX keys_tenant ON keys (tenant, created_at);
