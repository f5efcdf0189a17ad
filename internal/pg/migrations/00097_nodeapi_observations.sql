-- +goose Up

-- What the agent of a node last told of a workspace, as it was written to the log. An observation that says the same again is no event.
CREATE TABLE nodeapi.observation (
    node_id      uuid        NOT NULL,
    workspace_id uuid        NOT NULL,
    digest       bytea       NOT NULL,
    body         bytea       NOT NULL, -- gpuaas.node.v1.Observation
    written_at   timestamptz NOT NULL,
    PRIMARY KEY (node_id, workspace_id)
) WITH (fillfactor = 80);

-- The newest session of which each node's observations were written: what an earlier one told is not written any more.
CREATE TABLE nodeapi.observer (
    node_id    uuid        PRIMARY KEY,
    generation bigint      NOT NULL,
    since      timestamptz NOT NULL
) WITH (fillfactor = 70);
CREATE INDEX observer_since ON nodeapi.observer (since);

-- +goose Down
DROP TABLE nodeapi.observer, nodeapi.observation;
