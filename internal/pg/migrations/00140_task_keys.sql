-- +goose Up

-- The keys by which the agent of a node verifies tasks, as it reported in its session. Null: it reports none, as agents of earlier builds.
ALTER TABLE lifecycle.node_gate ADD COLUMN task_keys text[];

-- The key by which the task's attempt was signed. Null: it was not offered yet, or by an earlier build.
ALTER TABLE lifecycle.task ADD COLUMN key_id text;

-- The key was brought back from its file after a restore, so that the database does not know what it has signed.
ALTER TABLE mesh.signing_key ADD COLUMN returned boolean NOT NULL DEFAULT false;

-- +goose Down
ALTER TABLE mesh.signing_key DROP COLUMN returned;
ALTER TABLE lifecycle.task DROP COLUMN key_id;
ALTER TABLE lifecycle.node_gate DROP COLUMN task_keys;
