-- +goose Up

-- The generation of the session whose agent reported task_keys. A report of an earlier session counts for nothing: the agent may be another build since, and
-- a replica of lifecycle of an earlier build raises the gate without a word about the keys.
ALTER TABLE lifecycle.node_gate ADD COLUMN task_keys_epoch bigint NOT NULL DEFAULT 0;
UPDATE lifecycle.node_gate SET task_keys_epoch = session_epoch WHERE task_keys IS NOT NULL;

-- +goose Down
ALTER TABLE lifecycle.node_gate DROP COLUMN task_keys_epoch;
