-- +goose Up
-- An index of an expression over the body is written at each change of the row, and every other index of the table with
-- it, because the row cannot stay where its index entries point. The column holds what the expression reads, so that a
-- row of an instance changes in place again. Made from the body, it needs nothing of a replica of the build before, whose
-- statements read without an index until it has ended. The scratch table comes first, as in a comparison with a rebuild.
ALTER TABLE readmodel.scratch_instance ADD COLUMN node_id uuid GENERATED ALWAYS AS ((body->>'node_id')::uuid) STORED;
DROP INDEX IF EXISTS readmodel.instance_by_node;
ALTER TABLE readmodel.instance ADD COLUMN node_id uuid GENERATED ALWAYS AS ((body->>'node_id')::uuid) STORED;
CREATE INDEX instance_by_node ON readmodel.instance (node_id, instance_id);

-- +goose Down
DROP INDEX readmodel.instance_by_node;
ALTER TABLE readmodel.scratch_instance DROP COLUMN node_id;
ALTER TABLE readmodel.instance DROP COLUMN node_id;
CREATE INDEX instance_by_node ON readmodel.instance ((body->>'node_id'), instance_id);
