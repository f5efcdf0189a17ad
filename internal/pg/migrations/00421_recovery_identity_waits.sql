-- +goose NO TRANSACTION
-- +goose Up

-- Identities that a person or their machine has to move on, by how long they are in their state.
DROP INDEX CONCURRENTLY IF EXISTS recovery.identity_waits;
CREATE INDEX CONCURRENTLY identity_waits ON recovery.identity (state, state_at)
    WHERE state IN ('pending', 'held', 'quarantined', 'fenced');

-- +goose Down
DROP INDEX CONCURRENTLY recovery.identity_waits;
