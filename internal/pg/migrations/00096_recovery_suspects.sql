-- +goose Up

-- Nodes that recovery would refuse, or put on hold, only because it lacks a record of theirs. Too many of them within five minutes are no fault of theirs: the
-- brake engages, and they are told to wait. One row for each node; rows go an hour after the node was last seen so.
CREATE TABLE recovery.suspect (
    node_id  uuid        PRIMARY KEY,
    reason   text        NOT NULL, -- with which it would be refused
    first_at timestamptz NOT NULL,
    last_at  timestamptz NOT NULL,
    times    bigint      NOT NULL DEFAULT 1
) WITH (fillfactor = 70);
CREATE INDEX suspect_last ON recovery.suspect (last_at);

-- What engaged the brake last: workloads and machines that fail, or records of nodes that are missing.
ALTER TABLE recovery.brake ADD COLUMN cause text NOT NULL DEFAULT 'failures' CHECK (cause IN ('failures', 'records'));

-- +goose Down
ALTER TABLE recovery.brake DROP COLUMN cause;
DROP TABLE recovery.suspect;
