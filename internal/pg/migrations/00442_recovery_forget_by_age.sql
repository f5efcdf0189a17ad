-- +goose NO TRANSACTION
-- +goose Up

-- Decommissioned workspaces are forgotten in batches, the oldest first.
DROP INDEX CONCURRENTLY IF EXISTS recovery.watch_workspace_over;
CREATE INDEX CONCURRENTLY watch_workspace_over ON recovery.watch_workspace (state_at) WHERE state = 'decommissioned';
DROP INDEX CONCURRENTLY IF EXISTS recovery.watch_workspace_decommissioned;

-- +goose Down
DROP INDEX CONCURRENTLY IF EXISTS recovery.watch_workspace_decommissioned;
CREATE INDEX CONCURRENTLY watch_workspace_decommissioned ON recovery.watch_workspace (workspace_id)
    WHERE state = 'decommissioned';
DROP INDEX CONCURRENTLY recovery.watch_workspace_over;
