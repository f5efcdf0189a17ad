-- +goose Up

-- Where a walk that was stopped goes on; null when the next one begins at the oldest row.
ALTER TABLE mesh.retention ADD COLUMN place uuid;

-- +goose Down
ALTER TABLE mesh.retention DROP COLUMN place;
