-- +goose Up
-- What ended tasks still carry, for the sweep that clears it. It asks for the last moment to start, which a task keeps while it moves from one state to the
-- next, and not for the moment of its state: an index of that would be written with each move.
CREATE INDEX task_payload_left ON lifecycle.task (expires_at) WHERE NOT open AND payload <> '';

-- +goose Down
DROP INDEX lifecycle.task_payload_left;
