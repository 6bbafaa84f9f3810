-- Keys pinned to sandboxes, what ran in them, and copies of them that sleep.
CREATE TABLE sessions (
	id        TEXT PRIMARY KEY,
	tenant    TEXT NOT NULL,
	key       TEXT NOT NULL,
	state     TEXT NOT NULL,
	sandbox   TEXT NOT NULL,
	used      INTEGER NOT NULL, -- microseconds
	unsettled INTEGER NOT NULL, -- it has a sandbox, or the end of one is not in its log
	body      TEXT NOT NULL     -- JSON
);
CREATE UNIQUE INDEX sessions_key ON sessions (tenant, key);
CREATE INDEX sessions_used ON sessions (tenant, used, id);
CREATE INDEX sessions_state ON sessions (state); -- for counting them
CREATE INDEX sessions_sandbox ON sessions (tenant, sandbox);
CREATE INDEX sessions_unsettled ON sessions (unsettled) WHERE unsettled = 1;
CREATE INDEX sessions_unused ON sessions (used, id) WHERE unsettled = 0;

CREATE TABLE session_runs (
	id        TEXT PRIMARY KEY,
	session   TEXT NOT NULL,
	tenant    TEXT NOT NULL,
	sandbox   TEXT NOT NULL,
	cell      INTEGER NOT NULL,
	generation INTEGER NOT NULL,
	tool_call TEXT NOT NULL,
	code      TEXT NOT NULL,
	key       TEXT NOT NULL, -- of idempotency
	digest    TEXT NOT NULL,
	outcome   TEXT NOT NULL, -- empty while it runs
	started   INTEGER NOT NULL,
	ended     INTEGER NOT NULL,
	answer    BLOB
);
CREATE INDEX session_runs_session ON session_runs (session, cell);
CREATE UNIQUE INDEX session_runs_key ON session_runs (session, generation, key) WHERE key <> '';
CREATE INDEX session_runs_answers ON session_runs (session, cell) WHERE answer IS NOT NULL;
CREATE INDEX session_runs_open ON session_runs (outcome) WHERE outcome = '';

CREATE TABLE session_checkpoints (
	session TEXT NOT NULL,
	id      TEXT NOT NULL,
	created INTEGER NOT NULL,
	body    TEXT NOT NULL, -- JSON
	PRIMARY KEY (session, id)
);
