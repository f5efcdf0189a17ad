-- +goose Up

-- The cordon of a node that a verdict wants and that waits, as the gate's events show it. lifecycle.verdict_cordon has which cordons wait.
ALTER TABLE lifecycle.node_gate ADD COLUMN waiting_cordon text NOT NULL DEFAULT '';
ALTER TABLE lifecycle.node_gate ADD COLUMN waiting_cordon_since timestamptz;

CREATE INDEX gate_waiting_cordon ON readmodel.gate (node_id) WHERE body ? 'waiting_cordon';
CREATE INDEX scratch_gate_waiting_cordon ON readmodel.scratch_gate (node_id) WHERE body ? 'waiting_cordon';

-- +goose Down
DROP INDEX readmodel.scratch_gate_waiting_cordon;
DROP INDEX readmodel.gate_waiting_cordon;
ALTER TABLE lifecycle.node_gate DROP COLUMN waiting_cordon_since;
ALTER TABLE lifecycle.node_gate DROP COLUMN waiting_cordon;
