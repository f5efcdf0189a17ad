-- +goose Up

-- A cordon that a verdict wants and that waits, because verdicts want to cordon more of the fleet than may fail at once.
ALTER TABLE lifecycle.verdict_cordon ADD COLUMN withheld boolean NOT NULL DEFAULT false;
CREATE INDEX verdict_cordon_wanted ON lifecycle.verdict_cordon (node_id) WHERE reason <> '';
CREATE INDEX verdict_cordon_withheld ON lifecycle.verdict_cordon (since, node_id) WHERE withheld;

-- +goose Down
DROP INDEX lifecycle.verdict_cordon_withheld;
DROP INDEX lifecycle.verdict_cordon_wanted;
ALTER TABLE lifecycle.verdict_cordon DROP COLUMN withheld;
