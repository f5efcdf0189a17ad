-- +goose NO TRANSACTION
-- +goose Up

-- The ended instances that the watchdog forgets, in batches by workspace.
DROP INDEX CONCURRENTLY IF EXISTS recovery.watch_instance_superseded;
CREATE INDEX CONCURRENTLY watch_instance_superseded ON recovery.watch_instance (workspace_id)
    WHERE state = 'ended' AND superseded;
DROP INDEX CONCURRENTLY IF EXISTS recovery.watch_instance_ended;

-- +goose Down
DROP INDEX CONCURRENTLY IF EXISTS recovery.watch_instance_ended;
CREATE INDEX CONCURRENTLY watch_instance_ended ON recovery.watch_instance (workspace_id) WHERE state = 'ended';
DROP INDEX CONCURRENTLY recovery.watch_instance_superseded;
