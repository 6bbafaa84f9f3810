-- Files that were kept: names here, bytes by their digest elsewhere.
CREATE TABLE artifacts (
    seq       INTEGER PRIMARY KEY AUTOINCREMENT, -- the order of a listing; never used again
    id        TEXT    NOT NULL UNIQUE,
    tenant    TEXT    NOT NULL,
    name      TEXT    NOT NULL,
    path      TEXT    NOT NULL,
    mime      TEXT    NOT NULL,
    size      INTEGER NOT NULL,
    sha256    TEXT    NOT NULL,
    created   INTEGER NOT NULL,
    expires   INTEGER NOT NULL,
    session   TEXT    NOT NULL,
    key       TEXT    NOT NULL,
    sandbox   TEXT    NOT NULL,
    run       TEXT    NOT NULL,
    cell      INTEGER NOT NULL,
    tool_call TEXT    NOT NULL,
    datasets  TEXT    NOT NULL, -- digest of the list in artifact_datasets; empty: none
    source    TEXT    NOT NULL
);

CREATE INDEX artifacts_tenant ON artifacts (tenant, seq);
CREATE INDEX artifacts_session ON artifacts (session, seq);
CREATE INDEX artifacts_key ON artifacts (tenant, key, seq);
CREATE INDEX artifacts_run ON artifacts (run) WHERE run != '';
CREATE INDEX artifacts_blob ON artifacts (tenant, sha256);
CREATE INDEX artifacts_datasets ON artifacts (tenant, datasets) WHERE datasets != '';
CREATE INDEX artifacts_expires ON artifacts (expires) WHERE expires > 0;

-- What runs could see, each list once however many files were made from it.
CREATE TABLE artifact_datasets (
    tenant TEXT NOT NULL,
    digest TEXT NOT NULL,
    list   TEXT NOT NULL, -- JSON
    PRIMARY KEY (tenant, digest)
);

-- What is kept, so that a quota need not add up every artifact: session '' is the whole tenant.
CREATE TABLE artifact_sums (
    tenant  TEXT    NOT NULL,
    session TEXT    NOT NULL,
    bytes   INTEGER NOT NULL,
    files   INTEGER NOT NULL,
    PRIMARY KEY (tenant, session)
) WITHOUT ROWID;

-- One row: up to which seq the bytes outlive a loss of power.
CREATE TABLE artifact_settled (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    seq INTEGER NOT NULL
);
INSERT INTO artifact_settled VALUES (1, 0);

-- Keys that sign links.
CREATE TABLE link_keys (
    seq     INTEGER PRIMARY KEY AUTOINCREMENT,
    id      TEXT    NOT NULL UNIQUE,
    secret  TEXT    NOT NULL,
    created INTEGER NOT NULL,
    until   INTEGER NOT NULL -- 0: it signs
);
