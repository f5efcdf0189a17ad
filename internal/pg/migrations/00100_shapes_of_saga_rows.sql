-- +goose NO TRANSACTION
-- +goose Up

-- What a row of a saga must be is one function a table, under one constraint. Each constraint of a table is read and planned anew by every statement that
-- writes to it: the ten of saga_run cost more than the rest of an update of one row. A function is compiled once a session. The names of the rules stay.

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION lifecycle.is_run(r lifecycle.saga_run) RETURNS boolean LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF (r.kind IN ('create', 'retry', 'recreate', 'decommission', 'retry_release', 'force_release')
        AND r.state IN ('pending', 'running', 'waiting', 'compensating', 'succeeded', 'failed', 'stuck')
        AND r.phase IN ('do', 'undo') AND r.step >= 0 AND cardinality(r.step_names) > 0 AND (r.owner IS NULL OR r.owner <> '')
        AND (r.state IN ('succeeded', 'failed') OR r.why_waiting <> '') -- a live run always says what it waits for
        AND (r.state <> 'stuck' OR r.stuck_reason <> '')
        AND (r.owner IS NULL) = (r.lease_until IS NULL)
        AND (r.state IN ('succeeded', 'failed')) = (r.finished_at IS NOT NULL)) IS NOT FALSE
    THEN
        RETURN true;
    END IF;
    RAISE EXCEPTION 'a run must not be so' USING ERRCODE = 'check_violation', SCHEMA = 'lifecycle', TABLE = 'saga_run', CONSTRAINT = CASE
        WHEN (r.kind IN ('create', 'retry', 'recreate', 'decommission', 'retry_release', 'force_release')) IS FALSE THEN 'saga_run_kind_check'
        WHEN (r.state IN ('pending', 'running', 'waiting', 'compensating', 'succeeded', 'failed', 'stuck')) IS FALSE THEN 'saga_run_state_check'
        WHEN (r.phase IN ('do', 'undo')) IS FALSE THEN 'saga_run_phase_check'
        WHEN (r.step >= 0) IS FALSE THEN 'saga_run_step_check'
        WHEN (cardinality(r.step_names) > 0) IS FALSE THEN 'saga_run_step_names_check'
        WHEN (r.owner <> '') IS FALSE THEN 'saga_run_owner_check'
        WHEN (r.state IN ('succeeded', 'failed') OR r.why_waiting <> '') IS FALSE THEN 'live_says_why'
        WHEN (r.state <> 'stuck' OR r.stuck_reason <> '') IS FALSE THEN 'stuck_says_why'
        WHEN ((r.owner IS NULL) = (r.lease_until IS NULL)) IS FALSE THEN 'lease_is_whole'
        ELSE 'ended_is_dated' END;
END $$;

CREATE OR REPLACE FUNCTION lifecycle.is_workspace(w lifecycle.workspace) RETURNS boolean LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF (w.name <> '' AND w.desired_state IN ('active', 'decommissioned')
        AND w.state IN ('provisioning', 'active', 'failed', 'stuck', 'cancelling', 'recreating', 'decommissioning', 'decommissioned')) IS NOT FALSE
    THEN
        RETURN true;
    END IF;
    RAISE EXCEPTION 'a workspace must not be so' USING ERRCODE = 'check_violation', SCHEMA = 'lifecycle', TABLE = 'workspace', CONSTRAINT = CASE
        WHEN (w.name <> '') IS FALSE THEN 'workspace_name_check'
        WHEN (w.desired_state IN ('active', 'decommissioned')) IS FALSE THEN 'workspace_desired_state_check'
        ELSE 'workspace_state_check' END;
END $$;

CREATE OR REPLACE FUNCTION lifecycle.is_step(state text, dir text, last_output text) RETURNS boolean LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF (state IN ('running', 'waiting', 'succeeded', 'failed', 'cancelled', 'lost', 'abandoned') AND dir IN ('do', 'undo')
        AND octet_length(last_output) <= 2048) IS NOT FALSE
    THEN
        RETURN true;
    END IF;
    RAISE EXCEPTION 'an attempt at a step must not be so' USING ERRCODE = 'check_violation', SCHEMA = 'lifecycle', TABLE = 'saga_step', CONSTRAINT = CASE
        WHEN (dir IN ('do', 'undo')) IS FALSE THEN 'saga_step_dir_check'
        WHEN (octet_length(last_output) <= 2048) IS FALSE THEN 'saga_step_last_output_check'
        ELSE 'saga_step_state_check' END;
END $$;
-- +goose StatementEnd

-- The new constraint is validated beside the writers before the old ones go.
ALTER TABLE lifecycle.saga_run DROP CONSTRAINT IF EXISTS is_run, ADD CONSTRAINT is_run CHECK (lifecycle.is_run(saga_run)) NOT VALID;
ALTER TABLE lifecycle.saga_run VALIDATE CONSTRAINT is_run;
ALTER TABLE lifecycle.saga_run DROP CONSTRAINT IF EXISTS saga_run_kind_check, DROP CONSTRAINT IF EXISTS saga_run_state_check,
    DROP CONSTRAINT IF EXISTS saga_run_phase_check, DROP CONSTRAINT IF EXISTS saga_run_step_check, DROP CONSTRAINT IF EXISTS saga_run_step_names_check,
    DROP CONSTRAINT IF EXISTS saga_run_owner_check, DROP CONSTRAINT IF EXISTS live_says_why, DROP CONSTRAINT IF EXISTS stuck_says_why,
    DROP CONSTRAINT IF EXISTS lease_is_whole, DROP CONSTRAINT IF EXISTS ended_is_dated;
ALTER TABLE lifecycle.workspace DROP CONSTRAINT IF EXISTS is_workspace, ADD CONSTRAINT is_workspace CHECK (lifecycle.is_workspace(workspace)) NOT VALID;
ALTER TABLE lifecycle.workspace VALIDATE CONSTRAINT is_workspace;
ALTER TABLE lifecycle.workspace DROP CONSTRAINT IF EXISTS workspace_name_check, DROP CONSTRAINT IF EXISTS workspace_desired_state_check,
    DROP CONSTRAINT IF EXISTS workspace_state_check;
ALTER TABLE lifecycle.saga_step DROP CONSTRAINT IF EXISTS is_step, ADD CONSTRAINT is_step CHECK (lifecycle.is_step(state, dir, last_output)) NOT VALID;
ALTER TABLE lifecycle.saga_step VALIDATE CONSTRAINT is_step;
ALTER TABLE lifecycle.saga_step DROP CONSTRAINT IF EXISTS saga_step_dir_check, DROP CONSTRAINT IF EXISTS saga_step_state_check,
    DROP CONSTRAINT IF EXISTS saga_step_last_output_check;

-- +goose Down
ALTER TABLE lifecycle.saga_step DROP CONSTRAINT is_step, ADD CHECK (dir IN ('do', 'undo')), ADD CHECK (octet_length(last_output) <= 2048),
    ADD CHECK (state IN ('running', 'waiting', 'succeeded', 'failed', 'cancelled', 'lost', 'abandoned'));
ALTER TABLE lifecycle.workspace DROP CONSTRAINT is_workspace, ADD CHECK (name <> ''), ADD CHECK (desired_state IN ('active', 'decommissioned')),
    ADD CHECK (state IN ('provisioning', 'active', 'failed', 'stuck', 'cancelling', 'recreating', 'decommissioning', 'decommissioned'));
ALTER TABLE lifecycle.saga_run DROP CONSTRAINT is_run, ADD CHECK (cardinality(step_names) > 0), ADD CHECK (phase IN ('do', 'undo')),
    ADD CHECK (kind IN ('create', 'retry', 'recreate', 'decommission', 'retry_release', 'force_release')), ADD CHECK (step >= 0), ADD CHECK (owner <> ''),
    ADD CHECK (state IN ('pending', 'running', 'waiting', 'compensating', 'succeeded', 'failed', 'stuck')),
    ADD CONSTRAINT live_says_why CHECK (state IN ('succeeded', 'failed') OR why_waiting <> ''),
    ADD CONSTRAINT stuck_says_why CHECK (state <> 'stuck' OR stuck_reason <> ''),
    ADD CONSTRAINT lease_is_whole CHECK ((owner IS NULL) = (lease_until IS NULL)),
    ADD CONSTRAINT ended_is_dated CHECK ((state IN ('succeeded', 'failed')) = (finished_at IS NOT NULL));
DROP FUNCTION lifecycle.is_step(text, text, text);
DROP FUNCTION lifecycle.is_workspace(lifecycle.workspace);
DROP FUNCTION lifecycle.is_run(lifecycle.saga_run);
