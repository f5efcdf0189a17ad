-- +goose Up

-- When each thing was counted last, and with which numbers: one that is reported again with the same numbers is written
-- once a minute. A replica of the build before leaves the columns as they are, and what it counted is counted again.
ALTER TABLE recovery.rollback_seen
    ADD COLUMN last_at    timestamptz NOT NULL DEFAULT '-infinity',
    ADD COLUMN remembered bigint      NOT NULL DEFAULT 0,
    ADD COLUMN known      bigint      NOT NULL DEFAULT 0;

-- +goose Down
ALTER TABLE recovery.rollback_seen DROP COLUMN last_at, DROP COLUMN remembered, DROP COLUMN known;
