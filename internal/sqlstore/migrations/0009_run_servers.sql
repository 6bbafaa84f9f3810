-- The server in whose sessions a run is; empty: that of the only one that there is.
ALTER TABLE session_runs ADD COLUMN server TEXT NOT NULL DEFAULT '';
