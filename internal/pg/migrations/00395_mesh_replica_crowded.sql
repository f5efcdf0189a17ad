-- +goose Up

-- When a replica of nodeapi last turned agents away or had them wait for openings before theirs, as of a beat, and since when that counts. No node is called
-- down for such a time, see package replicas. NULL: never, or its build does not write it.
ALTER TABLE mesh.replica ADD COLUMN crowded_at timestamptz;
ALTER TABLE mesh.replica ADD COLUMN crowded_since timestamptz;

-- +goose Down
ALTER TABLE mesh.replica DROP COLUMN crowded_since, DROP COLUMN crowded_at;
