-- +goose NO TRANSACTION
-- +goose Up
-- The claims of a workspace that are not given back, orphans included: every release and every fence asks for them.
DROP INDEX CONCURRENTLY IF EXISTS lifecycle.resource_claim_unreleased;
CREATE INDEX CONCURRENTLY resource_claim_unreleased ON lifecycle.resource_claim (workspace_id) WHERE released_at IS NULL;

-- +goose Down
DROP INDEX CONCURRENTLY IF EXISTS lifecycle.resource_claim_unreleased;
