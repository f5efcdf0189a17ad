-- +goose Up
-- An index of an expression over the body is written at each change of the row, and every other index of the table with
-- it, because the row cannot stay where its index entries point. The columns hold what the expressions read, so that a
-- row of a node or an instance changes in place again. Made from the body, they need nothing of a replica of the build
-- before, whose statements go without an index until it has ended.
ALTER TABLE readmodel.instance ADD COLUMN node_id uuid GENERATED ALWAYS AS ((body->>'node_id')::uuid) STORED;
ALTER TABLE readmodel.scratch_instance ADD COLUMN node_id uuid GENERATED ALWAYS AS ((body->>'node_id')::uuid) STORED;
DROP INDEX IF EXISTS readmodel.instance_by_node;
CREATE INDEX instance_by_node ON readmodel.instance (node_id, instance_id);
ALTER TABLE readmodel.node ADD COLUMN workspace_id uuid GENERATED ALWAYS AS ((body->>'workspace_id')::uuid) STORED;
ALTER TABLE readmodel.scratch_node ADD COLUMN workspace_id uuid GENERATED ALWAYS AS ((body->>'workspace_id')::uuid) STORED;
DROP INDEX IF EXISTS readmodel.node_by_workspace;
CREATE INDEX node_by_workspace ON readmodel.node (workspace_id, name, node_id);

-- +goose Down
DROP INDEX readmodel.node_by_workspace;
CREATE INDEX node_by_workspace ON readmodel.node ((body->>'workspace_id'), name, node_id);
ALTER TABLE readmodel.scratch_node DROP COLUMN workspace_id;
ALTER TABLE readmodel.node DROP COLUMN workspace_id;
DROP INDEX readmodel.instance_by_node;
CREATE INDEX instance_by_node ON readmodel.instance ((body->>'node_id'), instance_id);
ALTER TABLE readmodel.scratch_instance DROP COLUMN node_id;
ALTER TABLE readmodel.instance DROP COLUMN node_id;
