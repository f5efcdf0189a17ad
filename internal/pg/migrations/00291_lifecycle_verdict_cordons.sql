-- +goose Up

-- The nodes that a verdict has had cordoned, and up to which version of their verdicts that is applied: an older one that
-- is read late changes nothing. A row goes with the node's gate.
CREATE TABLE lifecycle.verdict_cordon (
    node_id uuid        PRIMARY KEY REFERENCES lifecycle.node_gate ON DELETE CASCADE,
    version bigint      NOT NULL,
    reason  text        NOT NULL,                -- why the verdict wants the node cordoned; empty: it does not
    since   timestamptz NOT NULL
) WITH (fillfactor = 70);

-- +goose Down
DROP TABLE lifecycle.verdict_cordon;
