-- +goose Up

-- The last record of its host that a person brought for each node; what it explains is in recovery.evidence. A row goes with the node's own.
CREATE TABLE recovery.host_record (
    node_id    uuid        PRIMARY KEY REFERENCES recovery.judgement (node_id) ON DELETE CASCADE,
    digest     bytea       NOT NULL,            -- of the record, by which it is known when it is brought again
    brought_by text        NOT NULL,
    brought_at timestamptz NOT NULL,
    version    bigint      NOT NULL
) WITH (fillfactor = 70);

-- +goose Down
DROP TABLE recovery.host_record;
