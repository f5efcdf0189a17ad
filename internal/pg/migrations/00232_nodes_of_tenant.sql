-- +goose NO TRANSACTION
-- +goose Up
-- A page of the machines of one tenant, in the order of the list.
DROP INDEX CONCURRENTLY IF EXISTS readmodel.node_by_tenant_and_name;
CREATE INDEX CONCURRENTLY node_by_tenant_and_name ON readmodel.node (tenant_id, name, node_id) WHERE tenant_id IS NOT NULL;
DROP INDEX CONCURRENTLY IF EXISTS readmodel.node_by_tenant;

-- +goose Down
DROP INDEX CONCURRENTLY IF EXISTS readmodel.node_by_tenant;
CREATE INDEX CONCURRENTLY node_by_tenant ON readmodel.node (tenant_id) WHERE tenant_id IS NOT NULL;
DROP INDEX CONCURRENTLY IF EXISTS readmodel.node_by_tenant_and_name;
