-- +goose Up

-- Why a person closed the incident; empty while it is open, and for one that ended by itself.
ALTER TABLE recovery.incident ADD COLUMN close_reason text NOT NULL DEFAULT '';

-- +goose Down
ALTER TABLE recovery.incident DROP COLUMN close_reason;
