-- +goose Up

-- The records of hosts that agents are asked for because a verdict is better explained by them. A row goes when its task has ended, five minutes after
-- lifecycle first told of a task that has not ended, an hour after the verdict, and when its node is not active any more.
CREATE TABLE recovery.record_request (
    node_id        uuid        PRIMARY KEY REFERENCES recovery.judgement (node_id) ON DELETE CASCADE,
    began          bigint      NOT NULL,        -- the version of the verdict with which the reason began
    correlation_id text        NOT NULL,        -- of that verdict
    due_at         timestamptz NOT NULL,        -- when lifecycle is asked next
    asked_at       timestamptz,                 -- since when it has a place; null: it waits: it was not asked yet, lifecycle has refused, or did not answer
    task_at        timestamptz,                 -- when lifecycle first told of its task; null: it has told of none
    until          timestamptz NOT NULL         -- an hour after the verdict, when the request is given up whatever became of it
) WITH (fillfactor = 70);

-- +goose Down
DROP TABLE recovery.record_request;
