-- +goose Up

-- Sweeps ask for the nodes whose agents report no room, of which there are few.
CREATE INDEX node_gate_disk_full ON lifecycle.node_gate (node_id) WHERE (host->'stateDisk'->>'full') = 'true';

-- +goose Down
DROP INDEX lifecycle.node_gate_disk_full;
DELETE FROM lifecycle.finding WHERE kind = 'node_disk_full';
