-- +goose Up
-- The run that wrote the intent of a claim first. run_id is the last one to take the claim over; the undo of a run leaves what another one made.
ALTER TABLE lifecycle.resource_claim ADD COLUMN made_by_run uuid;

-- Of the runs that are under way it is known: a claim that was written after its run began is that run's. Of older ones nothing is needed, for no
-- run that is still to come has made them.
UPDATE lifecycle.resource_claim c SET made_by_run = c.run_id FROM lifecycle.saga_run r
WHERE r.id = c.run_id AND r.state IN ('pending', 'running', 'waiting', 'compensating', 'stuck')
    AND c.released_at IS NULL AND c.orphaned_at IS NULL AND c.intent_at >= r.created_at;

-- +goose Down
ALTER TABLE lifecycle.resource_claim DROP COLUMN made_by_run;
