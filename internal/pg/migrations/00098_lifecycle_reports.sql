-- +goose Up

-- What agents reported before nodeapi kept what it has written: each report that still holds is written once more as soon as its agent repeats it, and one
-- that its agent has forgotten would count for as long as the agent has a session.
DELETE FROM lifecycle.observed_workload;

-- +goose Down
SELECT 1;
