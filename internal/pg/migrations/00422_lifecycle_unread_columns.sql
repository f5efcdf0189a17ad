-- +goose Up

-- No statement reads or writes these columns: a lease does not note the agent's ledger, and when late evidence came is
-- in the event of its report.
ALTER TABLE lifecycle.task DROP COLUMN ledger_id;
ALTER TABLE lifecycle.late_evidence DROP COLUMN received_at;

-- +goose Down
ALTER TABLE lifecycle.late_evidence ADD COLUMN received_at timestamptz NOT NULL DEFAULT mesh.clock();
ALTER TABLE lifecycle.task ADD COLUMN ledger_id uuid;
