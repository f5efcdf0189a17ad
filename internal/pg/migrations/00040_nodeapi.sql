-- +goose Up
-- One row a replica: beats are never rows of their own, heartbeats of agents never rows at all.
CREATE TABLE nodeapi.replica (
    replica_id uuid PRIMARY KEY,
    started_at timestamptz NOT NULL,
    beat_at    timestamptz NOT NULL,
    sessions   integer     NOT NULL DEFAULT 0 CHECK (sessions >= 0),
    late       integer     NOT NULL DEFAULT 0 CHECK (late >= 0),
    leaving    boolean     NOT NULL DEFAULT false,
    version    bigint      NOT NULL
) WITH (fillfactor = 50);

-- +goose Down
DROP TABLE nodeapi.replica;
