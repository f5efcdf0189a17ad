-- +goose NO TRANSACTION
-- +goose Up
-- Claims that wait to be confirmed: few, unless an earlier build left them so.
DROP INDEX CONCURRENTLY IF EXISTS lifecycle.resource_claim_intended;
CREATE INDEX CONCURRENTLY resource_claim_intended ON lifecycle.resource_claim (kind, id)
    WHERE confirmed_at IS NULL AND released_at IS NULL AND orphaned_at IS NULL;

-- +goose Down
DROP INDEX CONCURRENTLY IF EXISTS lifecycle.resource_claim_intended;
