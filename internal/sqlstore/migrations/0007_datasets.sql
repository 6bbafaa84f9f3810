-- Data staged into sessions. Content lies beside the database, by its SHA-256; status is pending, staging, loaded or failed.
CREATE TABLE datasets (
    session TEXT    NOT NULL,
    id      TEXT    NOT NULL,
    tenant  TEXT    NOT NULL,
    file    TEXT    NOT NULL,
    status  TEXT    NOT NULL,
    path    TEXT    NOT NULL,
    size    INTEGER NOT NULL,
    sha256  TEXT    NOT NULL,
    error   TEXT    NOT NULL,
    updated INTEGER NOT NULL,
    PRIMARY KEY (session, id)
) WITHOUT ROWID;
CREATE UNIQUE INDEX datasets_file ON datasets (session, file);
CREATE INDEX datasets_content ON datasets (tenant, sha256) WHERE sha256 <> '';
CREATE INDEX datasets_staging ON datasets (status) WHERE status = 'staging';
