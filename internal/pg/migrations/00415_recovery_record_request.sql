-- +goose Up

-- The records of hosts that agents are asked for because a verdict is better explained by them. A row goes when its task has ended.
CREATE TABLE recovery.record_request (
    node_id        uuid        PRIMARY KEY REFERENCES recovery.judgement (node_id) ON DELETE CASCADE,
    began          bigint      NOT NULL,        -- the version of the verdict with which the reason began
    correlation_id text        NOT NULL,        -- of that verdict
    due_at         timestamptz NOT NULL,        -- when lifecycle is asked next
    asked_at       timestamptz,                 -- when it was asked first; null: it was not, or has refused
    until          timestamptz NOT NULL         -- when the request is given up
) WITH (fillfactor = 70);

-- +goose Down
DROP TABLE recovery.record_request;
