-- +goose Up

-- The request that made a person: the same one again, with the same key by the same giver, gets the person with a new token.
ALTER TABLE readmodel.person ADD COLUMN idempotency_key text NOT NULL DEFAULT '', ADD COLUMN asked_life interval;
CREATE UNIQUE INDEX person_idempotency ON readmodel.person (created_by, idempotency_key) WHERE idempotency_key <> '';

-- +goose Down
DROP INDEX readmodel.person_idempotency;
ALTER TABLE readmodel.person DROP COLUMN idempotency_key, DROP COLUMN asked_life;
