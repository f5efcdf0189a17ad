-- +goose Up

-- How often a node had which reason is counted for one node at a time.
CREATE INDEX verdict_period_of_node ON recovery.verdict_period (node_id, reason);

-- +goose Down
DROP INDEX recovery.verdict_period_of_node;
