-- +goose Up

-- When the account of a cut began: one that never came to its end is late by that.
ALTER TABLE mesh.retention ADD COLUMN first_at timestamptz;
UPDATE mesh.retention SET first_at = began_at;
ALTER TABLE mesh.retention ALTER COLUMN first_at SET DEFAULT mesh.clock(), ALTER COLUMN first_at SET NOT NULL;

-- +goose Down
ALTER TABLE mesh.retention DROP COLUMN first_at;
