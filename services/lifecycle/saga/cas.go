package saga

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/pg"
)

// The statements that every write of a driver goes through: each is a compare-and-set on the lease of many runs at once. What a move is, and what goes
// with it in its transaction, is in move.go.

// errCancelPending tells a healthy driver that its compare-and-set missed because of a cancel, not because of a lost lease.
var errCancelPending = errors.New("a cancel is pending")

// moveColumns are what every write of a driver is told, one array a column, one element a run.
const moveColumns = `$1::uuid[], $2::bigint[], $3::int[], $4::text[], $5::bool[], $6::int[], $7::text[], $8::text[], $9::text[], $10::text[],
	$11::text[], $12::text[], $13::bool[], $14::text[], $15::text[], $16::text[], $17::text[]`

const moveNames = `id, fence, step, phase, pass, attempt, cl_state, cl_why, code, err, layer, output, keep, state, why, cause, last_output`

// casRun is the compare-and-set that every write of a driver goes through. The elements come in the order of the runs' ids, and so do the locks. A
// condition on the state would make the planner scan all live runs by their partial index; who has an owner is running or compensating.
const (
	casRun = ` FROM m WHERE r.id = m.id AND r.fence = m.fence AND r.step = m.step AND r.phase = m.phase
	AND r.owner IS NOT NULL AND (m.pass OR r.phase = 'undo' OR r.cancel_requested_at IS NULL)
	RETURNING r.*`
	setError = `error_code = CASE WHEN m.keep THEN m.code ELSE r.error_code END, error = CASE WHEN m.keep THEN m.err ELSE r.error END,
	error_layer = CASE WHEN m.keep THEN m.layer ELSE r.error_layer END, error_step = CASE WHEN m.keep THEN m.step ELSE r.error_step END`
	// stuckKept keeps what was said of the whole run when a step moves on.
	stuckKept = `CASE WHEN r.stuck_reason LIKE 'run_stalled%' THEN r.stuck_reason ELSE '' END`
	// stuckParked keeps what was said of the step too: one whose attempt is parked, or failed and is followed by another, has not succeeded, and the flag says
	// so until it has. That no driver was there is over once one has parked it.
	//
	// Scenario: saga-step-wedged.
	stuckParked = `CASE WHEN r.stuck_reason LIKE 'run_stalled%' OR m.state IN ('waiting', 'compensating') AND r.stuck_reason LIKE 'step_stalled%'
		THEN r.stuck_reason ELSE '' END`
	// setMeanwhile keeps what stands in the way of an attempt that waits on: it is told anew only once the step has looked.
	setMeanwhile = `(error_code, error, error_layer, cause, last_output) = (SELECT m.code, m.err, m.layer, m.cause, m.last_output
		WHERE m.cl_state <> 'waiting' OR m.code <> '' UNION ALL
		SELECT s.error_code, s.error, s.error_layer, s.cause, s.last_output WHERE m.cl_state = 'waiting' AND m.code = '')`
	closeAttempt = `closed AS (UPDATE lifecycle.saga_step s SET state = m.cl_state,
		finished_at = CASE WHEN m.cl_state = 'waiting' THEN NULL ELSE mesh.clock() END, why_waiting = m.cl_why,
		` + setMeanwhile + `, output = COALESCE(m.output::jsonb, s.output), version = s.version + 1, outcome = m.cl_state
	FROM u JOIN m ON m.id = u.id
	WHERE s.run_id = u.id AND s.step = m.step AND s.dir = m.phase AND s.attempt = m.attempt AND s.state = 'running'
	RETURNING s.*)`
)

var advanceRuns = pg.Define(pg.RoleLifecycle, "saga.advance_runs", `WITH m AS (SELECT * FROM unnest(`+moveColumns+`, $18::int[], $19::text[], $20::bool[], $21::text[], $22::float8[], $23::float8[])
	AS m (`+moveNames+`, n_step, n_phase, bump, name, budget, stall)),
u AS (UPDATE lifecycle.saga_run r SET seal = NULL, step = m.n_step, phase = m.n_phase, state = m.state, attempts = 0, losses = 0,
	tried_since = mesh.clock(), fence = CASE WHEN m.bump THEN mesh.next(r.fence) ELSE r.fence END, why_waiting = m.why, stuck_reason = `+stuckKept+`,
	`+setError+`, version = r.version + 1`+casRun+`),
`+closeAttempt+`,
ws AS (UPDATE lifecycle.workspace w SET seal = NULL, op_seq = mesh.next(w.op_seq) FROM u WHERE w.id = u.workspace_id RETURNING w.id, w.op_seq),
opened AS (INSERT INTO lifecycle.saga_step AS s (run_id, step, name, dir, attempt, workspace_id, tenant_id, fence, op_seq, state, idem_key,
		deadline_at, stall_after)
	SELECT u.id, u.step, m.name, u.phase, 1 + COALESCE((SELECT max(p.attempt) FROM lifecycle.saga_step p
			WHERE p.run_id = u.id AND p.step = u.step AND p.dir = u.phase), 0),
		u.workspace_id, u.tenant_id, u.fence, ws.op_seq, 'running', u.id || '/' || m.name || '/' || u.phase,
		mesh.clock() + make_interval(secs => m.budget), make_interval(secs => m.stall)
	FROM u JOIN m ON m.id = u.id JOIN closed ON closed.run_id = u.id JOIN ws ON ws.id = u.workspace_id RETURNING s.*)
SELECT `+runColumns+`, `+stepColumns+`, `+pg.Columns[Attempt]("o")+`,
	COALESCE(extract(epoch FROM r.deadline_at - mesh.clock()), 86400)::float8, mesh.rolled_back()
FROM u r JOIN closed s ON s.run_id = r.id JOIN opened o ON o.run_id = r.id`)

var releaseLeases = pg.Define(pg.RoleLifecycle, "saga.release_leases", `WITH m AS (SELECT * FROM unnest(`+moveColumns+`, $18::bool[], $19::int[], $20::bigint[], $21::float8[], $22::text[])
	AS m (`+moveNames+`, wakeable, attempts, signal, after, stuck)),
u AS (UPDATE lifecycle.saga_run r SET seal = NULL, state = m.state, owner = NULL, lease_until = NULL, wakeable = m.wakeable, attempts = m.attempts, losses = 0,
	next_at = CASE WHEN m.wakeable AND r.signal <> m.signal THEN mesh.clock() ELSE mesh.clock() + make_interval(secs => m.after) END,
	why_waiting = m.why, stuck_reason = CASE WHEN m.stuck <> '' THEN m.stuck ELSE `+stuckParked+` END,
	`+setError+`, finished_at = CASE WHEN m.state IN ('succeeded', 'failed') THEN mesh.clock() END, version = r.version + 1`+casRun+`),
`+closeAttempt+`
SELECT `+runColumns+`, `+stepColumns+` FROM u r JOIN closed s ON s.run_id = r.id`)

// columns are the arrays of moveColumns.
type columns struct {
	ids, phases, states, clStates, clWhys, codes, errs, layers, whys, causes, lastOutputs []string
	outputs                                                                               []*string
	fences                                                                                []int64
	steps, attempts                                                                       []int32
	pass, keep                                                                            []bool
}

func (c *columns) add(mv *move, state, why string, keep bool) {
	code, text, layer := mv.cl.code()
	c.ids, c.fences = append(c.ids, mv.h.run.ID), append(c.fences, mv.h.run.Fence)
	c.steps, c.phases = append(c.steps, int32(mv.h.run.Step)), append(c.phases, mv.h.run.Phase)         //nolint:gosec // small counts
	c.pass, c.attempts = append(c.pass, mv.passOver()), append(c.attempts, int32(mv.h.attempt.Attempt)) //nolint:gosec // small counts
	c.clStates, c.clWhys = append(c.clStates, mv.cl.state), append(c.clWhys, mv.cl.why)
	c.codes, c.errs, c.layers = append(c.codes, code), append(c.errs, text), append(c.layers, layer)
	c.outputs = append(c.outputs, nullJSON(mv.cl.output))
	c.keep, c.states, c.whys = append(c.keep, keep), append(c.states, state), append(c.whys, why)
	c.causes, c.lastOutputs = append(c.causes, mv.cl.err.Cause()), append(c.lastOutputs, mv.cl.err.lastOutput())
}

func (c *columns) args(more ...any) []any {
	return append([]any{
		c.ids, c.fences, c.steps, c.phases, c.pass, c.attempts, c.clStates, c.clWhys, c.codes, c.errs, c.layers, c.outputs, c.keep, c.states, c.whys,
		c.causes, c.lastOutputs,
	}, more...)
}

func (c *Core) advanceAll(ctx context.Context, tx pgx.Tx, moves []*move, j *journal) error {
	if len(moves) == 0 {
		return nil
	}
	var cols columns
	var steps []int32
	var phases, stepNames []string
	var bumps []bool
	var budgets, stalls []float64
	for _, mv := range moves {
		step := &mv.h.def.Steps[mv.next.step]
		state := stateRunning
		if mv.next.phase == phaseUndo {
			state = stateCompensating
		}
		cols.add(mv, state, doing(mv.next.phase, step.Name), mv.next.keepError)
		steps, phases = append(steps, int32(mv.next.step)), append(phases, mv.next.phase) //nolint:gosec // small counts
		bumps, stepNames = append(bumps, mv.next.bumpFence), append(stepNames, step.Name)
		budgets, stalls = append(budgets, step.Budget.Seconds()), append(stalls, c.stallAfter(mv.h.def, step).Seconds())
	}
	rows, err := pg.Query(ctx, tx, advanceRuns, cols.args(steps, phases, bumps, stepNames, budgets, stalls)...)
	if err != nil {
		return fmt.Errorf("advance runs: %w", err)
	}
	found := map[string]held{}
	for rows.Next() {
		var to held
		var closed Attempt
		var left float64
		if err := rows.Scan(join(targets(&to.run), targets(&closed), targets(&to.attempt), []any{&left, &to.paused})...); err != nil {
			rows.Close()
			return fmt.Errorf("advance runs: %w", err)
		}
		to.runLeft, to.overdue = seconds(left), left <= 0
		found[to.run.ID] = to
		j.step(&closed)
		j.step(&to.attempt)
		j.run(&to.run)
	}
	if err := rows.Err(); err != nil {
		return fmt.Errorf("advance runs: %w", err)
	}
	for _, mv := range moves {
		to, ok := found[mv.h.run.ID]
		if !ok {
			if mv.err = c.whyMissed(ctx, tx, mv); mv.err != nil && !isMiss(mv.err) {
				return mv.err
			}
			continue
		}
		mv.to = to
		if mv.next.phase == phaseUndo && mv.h.run.Phase == phaseDo {
			if err := c.touchWorkspace(ctx, tx, &to.run, j, "", to.run.ErrorCode, to.run.Error); err != nil {
				return err
			}
		}
	}
	return nil
}

func (c *Core) releaseRuns(ctx context.Context, tx pgx.Tx, moves []*move, j *journal) error {
	if len(moves) == 0 {
		return nil
	}
	var cols columns
	var wakeable []bool
	var tries []int32
	var signals []int64
	var after []float64
	var stuck []string
	for _, mv := range moves {
		to := mv.rest
		cols.add(mv, to.state, to.why, to.keepError)
		wakeable, tries = append(wakeable, to.wakeable), append(tries, int32(to.attempts)) //nolint:gosec // small counts
		signals, after = append(signals, mv.h.run.Signal), append(after, to.after.Seconds())
		stuck = append(stuck, to.stuck)
	}
	rows, err := pg.Query(ctx, tx, releaseLeases, cols.args(wakeable, tries, signals, after, stuck)...)
	if err != nil {
		return fmt.Errorf("release runs: %w", err)
	}
	found := map[string]Run{}
	for rows.Next() {
		var run Run
		var closed Attempt
		if err := rows.Scan(join(targets(&run), targets(&closed))...); err != nil {
			rows.Close()
			return fmt.Errorf("release runs: %w", err)
		}
		found[run.ID] = run
		j.step(&closed)
		j.run(&run)
	}
	if err := rows.Err(); err != nil {
		return fmt.Errorf("release runs: %w", err)
	}
	for _, mv := range moves {
		run, ok := found[mv.h.run.ID]
		if !ok {
			if mv.err = c.whyMissed(ctx, tx, mv); mv.err != nil && !isMiss(mv.err) {
				return mv.err
			}
			continue
		}
		mv.runNow = run
	}
	if err := c.touchWorkspaces(ctx, tx, moves, j); err != nil {
		return err
	}
	for _, mv := range moves {
		if mv.err == nil {
			j.decided(ctx, &mv.runNow)
		}
	}
	return nil
}

// isMiss says whether err speaks of one run's compare-and-set, and leaves the others of the transaction alone.
func isMiss(err error) bool { return errors.Is(err, ErrFenced) || errors.Is(err, errCancelPending) }

// whyMissed tells a pending cancel from a lost lease after a compare-and-set that found nothing.
func (c *Core) whyMissed(ctx context.Context, tx pgx.Tx, mv *move) error {
	now, err := GetRun(ctx, tx, mv.h.run.ID)
	if err != nil {
		return err
	}
	was := &mv.h.run
	ours := now.Fence == was.Fence && now.Owner == was.Owner
	switch {
	case ours && now.Step == was.Step && now.Phase == was.Phase && !mv.passOver() && now.Phase == phaseDo && now.CancelAt != nil:
		mv.runNow = now
		return errCancelPending
	case ours && now.Live():
		return fmt.Errorf("run %s is ours, but its open attempt is not the one that ends", now.ID)
	}
	c.stats.FencedOut.Add(1)
	return ErrFenced
}

func doing(phase, step string) string {
	if phase == phaseUndo {
		return fmt.Sprintf("undoing the step %q", step)
	}
	return fmt.Sprintf("doing the step %q", step)
}

func nullJSON(raw json.RawMessage) *string {
	if len(raw) == 0 {
		return nil
	}
	text := string(raw)
	return &text
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

func join(lists ...[]any) []any {
	var out []any
	for _, l := range lists {
		out = append(out, l...)
	}
	return out
}
