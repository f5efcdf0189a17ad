-- +goose Up

-- Where a replica of nodeapi is reached by other services; empty for one of an earlier version.
ALTER TABLE lifecycle.replica_seen ADD COLUMN address text NOT NULL DEFAULT '';

-- +goose Down
ALTER TABLE lifecycle.replica_seen DROP COLUMN address;
