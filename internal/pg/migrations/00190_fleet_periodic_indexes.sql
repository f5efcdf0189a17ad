-- +goose NO TRANSACTION
-- +goose Up
-- What periodic statements look for, so that they do not read all there is: the keys that nodes may hold join states of, and sessions by the replica that
-- serves them.
DROP INDEX CONCURRENTLY IF EXISTS recovery.identity_join_keys;
CREATE INDEX CONCURRENTLY identity_join_keys ON recovery.identity (join_keys) WHERE state <> 'retired';
DROP INDEX CONCURRENTLY IF EXISTS recovery.watch_session_served;
CREATE INDEX CONCURRENTLY watch_session_served ON recovery.watch_session (replica_id) WHERE serving;

-- +goose Down
DROP INDEX CONCURRENTLY IF EXISTS recovery.watch_session_served;
DROP INDEX CONCURRENTLY IF EXISTS recovery.identity_join_keys;
