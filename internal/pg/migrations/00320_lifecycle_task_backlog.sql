-- +goose Up

-- Nodes of which the sweep ended queued tasks as expired. The row is made by the first such sweep, which reports it, and goes with a later one that finds
-- nothing more of a node that is connected, or after a day.
CREATE TABLE lifecycle.task_backlog (
    node_id uuid        PRIMARY KEY,
    expired bigint      NOT NULL, -- tasks since the row was made
    since   timestamptz NOT NULL, -- of the first sweep that expired some
    last_at timestamptz NOT NULL, -- of the last one
    version bigint      NOT NULL  -- rises with each row of a node: the microseconds of the database's clock
) WITH (fillfactor = 70);
GRANT SELECT, INSERT, UPDATE, DELETE ON lifecycle.task_backlog TO lifecycle;

-- +goose Down
DROP TABLE lifecycle.task_backlog;
