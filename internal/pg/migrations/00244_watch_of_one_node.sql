-- +goose NO TRANSACTION
-- +goose Up
-- The snapshot of a watch of one node reads the instances on it, that of one workspace the machines that were launched
-- for it, both in the order of their lists.
DROP INDEX CONCURRENTLY IF EXISTS readmodel.instance_by_node;
CREATE INDEX CONCURRENTLY instance_by_node ON readmodel.instance ((body->>'node_id'), instance_id);
DROP INDEX CONCURRENTLY IF EXISTS readmodel.node_by_workspace;
CREATE INDEX CONCURRENTLY node_by_workspace ON readmodel.node ((body->>'workspace_id'), name, node_id);

-- +goose Down
DROP INDEX CONCURRENTLY IF EXISTS readmodel.instance_by_node;
DROP INDEX CONCURRENTLY IF EXISTS readmodel.node_by_workspace;
