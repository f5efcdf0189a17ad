-- +goose Up
-- As 00247, for the rows of nodes; in a transaction of its own, so that no reader of both tables meets the two locks.
ALTER TABLE readmodel.scratch_node ADD COLUMN workspace_id uuid GENERATED ALWAYS AS ((body->>'workspace_id')::uuid) STORED;
DROP INDEX IF EXISTS readmodel.node_by_workspace;
ALTER TABLE readmodel.node ADD COLUMN workspace_id uuid GENERATED ALWAYS AS ((body->>'workspace_id')::uuid) STORED;
CREATE INDEX node_by_workspace ON readmodel.node (workspace_id, name, node_id);

-- +goose Down
DROP INDEX readmodel.node_by_workspace;
ALTER TABLE readmodel.scratch_node DROP COLUMN workspace_id;
ALTER TABLE readmodel.node DROP COLUMN workspace_id;
CREATE INDEX node_by_workspace ON readmodel.node ((body->>'workspace_id'), name, node_id);
