-- +goose Up

-- Versions of observations are times in microseconds. Replicas took them from their own clocks: one that is ahead of the database's would hide what is seen
-- until that time has come.
UPDATE readmodel.observed SET version = (EXTRACT(EPOCH FROM mesh.clock()) * 1000000)::bigint
WHERE version > (EXTRACT(EPOCH FROM mesh.clock()) * 1000000)::bigint;

-- +goose Down
SELECT 1;
