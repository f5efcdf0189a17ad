package drive

import (
	"strings"

	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
)

// The statements that every write of a driver goes through. Each is a compare-and-set on the leases of many runs at
// once, and returns for each run the values that this process cannot compute: its numbers, the clock, and the versions
// by which the process detects whether its copy of the rows is current.

// transitionColumns are the arguments of every write of a driver, one array a column, one element a run.
const transitionColumns = `$1::uuid[], $2::bigint[], $3::int[], $4::text[], $5::bool[], $6::int[], $7::text[],
	$8::text[], $9::text[], $10::text[], $11::text[], $12::text[], $13::bool[], $14::text[], $15::text[], $16::text[],
	$17::text[], $18::text[], $19::bigint[], $20::timestamptz[], $21::timestamptz[], $22::float8[], $23::bigint[]`

const transitionNames = `id, fence, step, phase, pass, attempt, cl_state, cl_why, code, err, layer, output, keep, state,
	why, cause, last_output, name, op_seq, started, deadline, stall, version`

// casRun is the compare-and-set that every write of a driver goes through. The elements come in the order of the runs'
// ids, and so do the locks. It has no condition on the state, which would make the planner scan all live runs by their
// partial index; a run with an owner is running or compensating.
const (
	casRun = ` FROM m WHERE r.id = m.id AND r.fence = m.fence AND r.step = m.step AND r.phase = m.phase
	AND r.owner IS NOT NULL AND (m.pass OR r.phase = 'undo' OR r.cancel_requested_at IS NULL)
	RETURNING m.*, r.workspace_id, r.tenant_id, r.version AS now_version, r.stuck_reason AS now_stuck`
	setError = `error_code = CASE WHEN m.keep THEN m.code ELSE r.error_code END,
	error = CASE WHEN m.keep THEN m.err ELSE r.error END,
	error_layer = CASE WHEN m.keep THEN m.layer ELSE r.error_layer END,
	error_step = CASE WHEN m.keep THEN m.step ELSE r.error_step END`
	// stuckKept keeps the flag of the whole run when a step moves on.
	stuckKept = `CASE WHEN r.stuck_reason LIKE 'run_stalled%' THEN r.stuck_reason ELSE '' END`
	// stuckParked keeps the flag of the step too: a step whose attempt is parked, or failed and is followed by another,
	// has not succeeded, and its flag stays until it has. The flag that no driver leased the run ends once a driver has
	// parked it.
	//
	// Scenario: saga-step-wedged.
	stuckParked = `CASE WHEN r.stuck_reason LIKE 'run_stalled%' OR m.state IN ('waiting', 'compensating')
		AND r.stuck_reason LIKE 'step_stalled%'
		THEN r.stuck_reason ELSE '' END`
	// closeAttempt writes the row of the attempt that ends or is parked. Mostly it is the attempt's first row, because an
	// open attempt is in its run's row until it is parked or has a heartbeat, progress or a flag. The key of an ended
	// attempt is computed from its row (see Attempt); a parked attempt stores it for builds that read it. The insert finds
	// an existing row itself: a second part of the statement for attempts without a row would spare 55 bytes of the log a
	// step, and cost more processor than that.
	closeAttempt = `closed AS (
	INSERT INTO lifecycle.saga_step AS s (run_id, step, name, dir, attempt, workspace_id, tenant_id, fence, op_seq, state,
		idem_key, started_at, deadline_at, stall_after, finished_at, outcome, why_waiting, error_code, error, error_layer,
		cause, last_output, output, version)
	SELECT u.id, u.step, u.name, u.phase, u.attempt, u.workspace_id, u.tenant_id, u.fence, u.op_seq, u.cl_state,
		CASE WHEN u.cl_state = 'waiting' THEN u.id || '/' || u.name || '/' || u.phase ELSE '' END,
		u.started, u.deadline, make_interval(secs => u.stall),
		CASE WHEN u.cl_state <> 'waiting' THEN u.now END, u.cl_state, u.cl_why,
		u.code, u.err, u.layer, u.cause, u.last_output, u.output::jsonb, u.version + 1
	FROM u
	ON CONFLICT ` + runs.StepKey + ` DO UPDATE
	SET state = EXCLUDED.state, finished_at = EXCLUDED.finished_at, outcome = EXCLUDED.outcome,
		why_waiting = EXCLUDED.why_waiting, output = COALESCE(EXCLUDED.output, s.output),
		deadline_at = COALESCE(s.deadline_at, EXCLUDED.deadline_at), version = s.version + 1, `
	// ofOpen ends the statement part: an attempt that is closed stays as it is.
	ofOpen = `
	WHERE s.state = 'running'
	RETURNING s.run_id, s.version, s.finished_at)`
	setAttemptError = `error_code = EXCLUDED.error_code, error = EXCLUDED.error, error_layer = EXCLUDED.error_layer,
		cause = EXCLUDED.cause, last_output = EXCLUDED.last_output`
)

// setMeanwhile keeps the error that an attempt shows while it waits (WaitFor.Meanwhile) until a later wait replaces it
// or the attempt ends.
var setMeanwhile = func() string {
	var set []string
	for _, column := range []string{"error_code", "error", "error_layer", "cause", "last_output"} {
		set = append(set, column+` = CASE WHEN EXCLUDED.state = 'waiting' AND EXCLUDED.error_code = '' THEN s.`+column+
			` ELSE EXCLUDED.`+column+` END`)
	}
	return strings.Join(set, ", ")
}()
