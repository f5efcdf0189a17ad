-- +goose NO TRANSACTION
-- +goose Up

-- A sweep reads the suspicions and open findings of its source. A build before settles a scan in one transaction, which
-- an index made in the usual way would wait for.
DROP INDEX CONCURRENTLY IF EXISTS lifecycle.suspicion_of_source;
CREATE INDEX CONCURRENTLY suspicion_of_source ON lifecycle.suspicion (source);
DROP INDEX CONCURRENTLY IF EXISTS lifecycle.finding_of_source;
CREATE INDEX CONCURRENTLY finding_of_source ON lifecycle.finding (source) WHERE resolved_at IS NULL;

-- +goose Down
DROP INDEX CONCURRENTLY lifecycle.finding_of_source;
DROP INDEX CONCURRENTLY lifecycle.suspicion_of_source;
