-- +goose Up

-- How long after it is queued the task may still start: each time that it is queued. Null: an earlier build queued it, and its first window is expires_at -
-- created_at, as far as it has not been queued again.
ALTER TABLE lifecycle.task ADD COLUMN start_within interval;

-- +goose Down
ALTER TABLE lifecycle.task DROP COLUMN start_within;
