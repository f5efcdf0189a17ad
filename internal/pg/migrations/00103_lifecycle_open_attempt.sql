-- +goose Up

-- The open attempt of a run that a driver holds stands in the run's row alone, and gets its row of saga_step when it is closed, parked, or tells of
-- itself: open_attempt is its number (0: none is open here), open_since when it began. What earlier builds opened stays a row of saga_step.
--
-- A run draws its operation numbers from a range of its workspace's: op_seq is the newest it has used, op_last the end of the range. A run of an earlier
-- build has no range, and draws one with its next attempt.
ALTER TABLE lifecycle.saga_run
    ADD COLUMN op_seq       bigint      NOT NULL DEFAULT 0,
    ADD COLUMN op_last      bigint      NOT NULL DEFAULT 0,
    ADD COLUMN open_attempt integer     NOT NULL DEFAULT 0,
    ADD COLUMN open_since   timestamptz;

-- +goose Down
-- What is open in runs' rows becomes rows of saga_step again.
INSERT INTO lifecycle.saga_step (run_id, step, name, dir, attempt, workspace_id, tenant_id, fence, op_seq, state, idem_key, started_at, stall_after)
SELECT r.id, r.step, r.step_names[r.step + 1], r.phase, r.open_attempt, r.workspace_id, r.tenant_id, r.fence, r.op_seq, 'running',
    r.id || '/' || r.step_names[r.step + 1] || '/' || r.phase, r.open_since, interval '5 minutes'
FROM lifecycle.saga_run r WHERE r.open_attempt > 0
ON CONFLICT (run_id, step, dir, attempt) DO NOTHING;
ALTER TABLE lifecycle.saga_run DROP COLUMN open_since, DROP COLUMN open_attempt, DROP COLUMN op_last, DROP COLUMN op_seq;
-- +goose StatementBegin
DO $$
BEGIN
    IF to_regprocedure('lifecycle.seal_again()') IS NOT NULL THEN
        CALL lifecycle.seal_again();
    END IF;
END $$;
-- +goose StatementEnd
