-- What sandboxes see of the outside, and a listing by why they ended.
ALTER TABLE sandboxes ADD COLUMN mounts TEXT NOT NULL DEFAULT 'null'; -- JSON
CREATE INDEX sandboxes_cause ON sandboxes (tenant, cause) WHERE state = 'ended';
