-- +goose NO TRANSACTION
-- +goose Up
-- What ended tasks still carry, for the sweep that clears it. It asks for the last moment to start, which a task keeps while it moves from one state to the
-- next, and not for the moment of its state: an index of that would be written with each move. Nearly all ended tasks of earlier builds are in it: it is
-- built beside the work that goes on. One that a failed attempt left behind is no index.
DROP INDEX CONCURRENTLY IF EXISTS lifecycle.task_payload_left;
CREATE INDEX CONCURRENTLY task_payload_left ON lifecycle.task (expires_at) WHERE NOT open AND payload <> '';

-- +goose Down
DROP INDEX CONCURRENTLY IF EXISTS lifecycle.task_payload_left;
