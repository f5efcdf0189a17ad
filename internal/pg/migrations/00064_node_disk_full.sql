-- +goose Up

-- The kinds of findings are those of the contract's enum, which the writer spells; the column holds to their form.
ALTER TABLE lifecycle.finding DROP CONSTRAINT finding_kind_check;
ALTER TABLE lifecycle.finding ADD CONSTRAINT finding_kind_check CHECK (kind ~ '^[a-z][a-z0-9_]*$');

-- Sweeps ask for the nodes whose agents report no room, of which there are few.
CREATE INDEX node_gate_disk_full ON lifecycle.node_gate (node_id) WHERE (host->'stateDisk'->>'full') = 'true';

-- +goose Down
DROP INDEX lifecycle.node_gate_disk_full;
DELETE FROM lifecycle.finding WHERE kind = 'node_disk_full';
