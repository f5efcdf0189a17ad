-- +goose NO TRANSACTION
-- +goose Up
-- Lists of one tenant and of all, in the order in which they are shown.
DROP INDEX CONCURRENTLY IF EXISTS readmodel.workspace_by_path;
CREATE INDEX CONCURRENTLY workspace_by_path ON readmodel.workspace ((tenant || '/' || name), workspace_id);
DROP INDEX CONCURRENTLY IF EXISTS readmodel.workspace_by_tenant_and_path;
CREATE INDEX CONCURRENTLY workspace_by_tenant_and_path ON readmodel.workspace (tenant_id, (tenant || '/' || name), workspace_id);
DROP INDEX CONCURRENTLY IF EXISTS readmodel.workspace_by_state_and_path;
CREATE INDEX CONCURRENTLY workspace_by_state_and_path ON readmodel.workspace (state, (tenant || '/' || name), workspace_id);
DROP INDEX CONCURRENTLY IF EXISTS readmodel.workspace_by_tenant_id;
DROP INDEX CONCURRENTLY IF EXISTS readmodel.claim_by_tenant_and_id;
CREATE INDEX CONCURRENTLY claim_by_tenant_and_id ON readmodel.claim (tenant_id, claim_id);
DROP INDEX CONCURRENTLY IF EXISTS readmodel.task_by_tenant_and_id;
CREATE INDEX CONCURRENTLY task_by_tenant_and_id ON readmodel.task (tenant_id, task_id) WHERE tenant_id IS NOT NULL;
DROP INDEX CONCURRENTLY IF EXISTS readmodel.allocation_by_tenant_and_id;
CREATE INDEX CONCURRENTLY allocation_by_tenant_and_id ON readmodel.allocation (tenant_id, allocation_id);

-- What is being released, what a workspace has ever held, and the instance of a workspace.
DROP INDEX CONCURRENTLY IF EXISTS lifecycle.allocation_releasing;
CREATE INDEX CONCURRENTLY allocation_releasing ON lifecycle.allocation (workspace_id) WHERE state = 'releasing';
DROP INDEX CONCURRENTLY IF EXISTS lifecycle.allocation_of_workspace;
CREATE INDEX CONCURRENTLY allocation_of_workspace ON lifecycle.allocation (workspace_id, epoch);
DROP INDEX CONCURRENTLY IF EXISTS lifecycle.node_gate_of_workspace;
CREATE INDEX CONCURRENTLY node_gate_of_workspace ON lifecycle.node_gate (workspace_id, epoch) WHERE workspace_id IS NOT NULL;

-- What the watchdog may forget.
DROP INDEX CONCURRENTLY IF EXISTS recovery.watch_workspace_decommissioned;
CREATE INDEX CONCURRENTLY watch_workspace_decommissioned ON recovery.watch_workspace (workspace_id) WHERE state = 'decommissioned';
DROP INDEX CONCURRENTLY IF EXISTS recovery.watch_instance_ended;
CREATE INDEX CONCURRENTLY watch_instance_ended ON recovery.watch_instance (workspace_id) WHERE state = 'ended';
DROP INDEX CONCURRENTLY IF EXISTS recovery.watch_session_over;
CREATE INDEX CONCURRENTLY watch_session_over ON recovery.watch_session (since) WHERE NOT serving;

-- +goose Down
DROP INDEX CONCURRENTLY IF EXISTS recovery.watch_session_over;
DROP INDEX CONCURRENTLY IF EXISTS recovery.watch_instance_ended;
DROP INDEX CONCURRENTLY IF EXISTS recovery.watch_workspace_decommissioned;
DROP INDEX CONCURRENTLY IF EXISTS lifecycle.node_gate_of_workspace;
DROP INDEX CONCURRENTLY IF EXISTS lifecycle.allocation_of_workspace;
DROP INDEX CONCURRENTLY IF EXISTS lifecycle.allocation_releasing;
DROP INDEX CONCURRENTLY IF EXISTS readmodel.allocation_by_tenant_and_id;
DROP INDEX CONCURRENTLY IF EXISTS readmodel.task_by_tenant_and_id;
DROP INDEX CONCURRENTLY IF EXISTS readmodel.claim_by_tenant_and_id;
DROP INDEX CONCURRENTLY IF EXISTS readmodel.workspace_by_tenant_id;
CREATE INDEX CONCURRENTLY workspace_by_tenant_id ON readmodel.workspace (tenant_id);
DROP INDEX CONCURRENTLY IF EXISTS readmodel.workspace_by_state_and_path;
DROP INDEX CONCURRENTLY IF EXISTS readmodel.workspace_by_tenant_and_path;
DROP INDEX CONCURRENTLY IF EXISTS readmodel.workspace_by_path;
