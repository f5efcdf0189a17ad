-- +goose NO TRANSACTION
-- +goose Up
-- What stands on a node and what a tenant holds: neither may read what has ended.
DROP INDEX CONCURRENTLY IF EXISTS lifecycle.allocation_of_node;
CREATE INDEX CONCURRENTLY allocation_of_node ON lifecycle.allocation (node_id) WHERE state <> 'released';
DROP INDEX CONCURRENTLY IF EXISTS lifecycle.allocation_of_tenant;
CREATE INDEX CONCURRENTLY allocation_of_tenant ON lifecycle.allocation (tenant_id, workspace_id) WHERE state <> 'released';
DROP INDEX CONCURRENTLY IF EXISTS lifecycle.resource_claim_orphan_of_node;
CREATE INDEX CONCURRENTLY resource_claim_orphan_of_node ON lifecycle.resource_claim (node_id)
    WHERE orphaned_at IS NOT NULL AND released_at IS NULL;
DROP INDEX CONCURRENTLY IF EXISTS lifecycle.workspace_in_use;
CREATE INDEX CONCURRENTLY workspace_in_use ON lifecycle.workspace (tenant_id) WHERE state NOT IN ('failed', 'decommissioned');

-- +goose Down
DROP INDEX CONCURRENTLY IF EXISTS lifecycle.workspace_in_use;
DROP INDEX CONCURRENTLY IF EXISTS lifecycle.resource_claim_orphan_of_node;
DROP INDEX CONCURRENTLY IF EXISTS lifecycle.allocation_of_tenant;
DROP INDEX CONCURRENTLY IF EXISTS lifecycle.allocation_of_node;
