-- +goose Up

-- The end of what a workload wrote whose failure ended an attempt. For people of its tenant and operators.
ALTER TABLE lifecycle.saga_step ADD COLUMN last_output text NOT NULL DEFAULT '' CHECK (octet_length(last_output) <= 2048);

-- +goose Down
ALTER TABLE lifecycle.saga_step DROP COLUMN last_output;
