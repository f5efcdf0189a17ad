-- +goose NO TRANSACTION
-- +goose Up

-- Verdicts are announced in pages by node, without the rows of nodes that never had a verdict. Without this index, a
-- page reads those rows of the rest of the fleet.
DROP INDEX CONCURRENTLY IF EXISTS recovery.verdict_announced;
CREATE INDEX CONCURRENTLY verdict_announced ON recovery.verdict (node_id) WHERE version > 0;

-- +goose Down
DROP INDEX CONCURRENTLY recovery.verdict_announced;
