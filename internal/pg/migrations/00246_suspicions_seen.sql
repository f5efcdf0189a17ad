-- +goose Up

-- When the detector last saw it. A detector that no replica runs any more, of a placement that was taken out of the
-- configuration for one, deletes no suspicion: its own end by this time.
ALTER TABLE lifecycle.suspicion ADD COLUMN seen_at timestamptz NOT NULL DEFAULT mesh.clock();

-- +goose Down
ALTER TABLE lifecycle.suspicion DROP COLUMN seen_at;
