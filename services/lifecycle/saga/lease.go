package saga

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/pg"
)

const leaseSQL = `WITH c AS (
	SELECT r.id FROM lifecycle.saga_run r
	WHERE r.state IN ('pending', 'running', 'waiting', 'compensating') AND r.next_at <= mesh.clock()
		AND r.definition || ':' || r.def_version = ANY ($4) AND r.id <> ALL ($5::uuid[])
		AND NOT EXISTS (SELECT 1 FROM lifecycle.run_pause p WHERE p.run_id = r.id AND p.since IS NOT NULL)
	ORDER BY r.next_at LIMIT $3 FOR NO KEY UPDATE SKIP LOCKED)
UPDATE lifecycle.saga_run r SET seal = NULL, owner = $1, fence = mesh.next(r.fence), lease_until = mesh.clock() + make_interval(secs => $2),
	next_at = mesh.clock() + make_interval(secs => $2), heartbeat_at = mesh.clock(), losses = r.losses + (r.owner IS NOT NULL)::int,
	state = CASE WHEN r.phase = 'undo' THEN 'compensating' ELSE 'running' END,
	why_waiting = CASE WHEN r.phase = 'undo' THEN 'undoing the step "' ELSE 'doing the step "' END || COALESCE(r.step_names[r.step + 1], '?') || '"',
	version = r.version + 1
FROM c WHERE r.id = c.id
RETURNING ` + runColumns + `, COALESCE(extract(epoch FROM r.deadline_at - mesh.clock()), 86400)::float8, (SELECT mesh.rolled_back())`

const lostSQL = `UPDATE lifecycle.saga_step s SET state = 'lost', finished_at = mesh.clock(), outcome = 'lost', why_waiting = '',
	error = 'its driver lost the lease', error_code = '', error_layer = '', cause = '', last_output = '', version = s.version + 1
WHERE s.run_id = ANY ($1::uuid[]) AND s.state = 'running' RETURNING ` + stepColumns

const resumeSQL = `UPDATE lifecycle.saga_step s SET state = 'running', fence = r.fence, why_waiting = '', heartbeat_at = mesh.clock(), version = s.version + 1
FROM lifecycle.saga_run r WHERE r.id = s.run_id AND s.run_id = ANY ($1::uuid[]) AND s.state = 'waiting' RETURNING ` + stepColumns

const openSQL = `WITH o AS (
	SELECT * FROM unnest($1::uuid[], $2::text[], $3::float8[], $4::float8[]) AS o (run_id, name, budget, stall)),
ws AS (UPDATE lifecycle.workspace w SET seal = NULL, op_seq = mesh.next(w.op_seq)
	FROM lifecycle.saga_run r JOIN o ON o.run_id = r.id WHERE w.id = r.workspace_id RETURNING w.id, w.op_seq)
INSERT INTO lifecycle.saga_step AS s (run_id, step, name, dir, attempt, workspace_id, tenant_id, fence, op_seq, state, idem_key, deadline_at,
	stall_after, heartbeat_at)
SELECT r.id, r.step, o.name, r.phase, 1 + COALESCE((SELECT max(p.attempt) FROM lifecycle.saga_step p
		WHERE p.run_id = r.id AND p.step = r.step AND p.dir = r.phase), 0),
	r.workspace_id, r.tenant_id, r.fence, ws.op_seq, 'running', r.id || '/' || o.name || '/' || r.phase,
	mesh.clock() + make_interval(secs => o.budget), make_interval(secs => o.stall), mesh.clock()
FROM o JOIN lifecycle.saga_run r ON r.id = o.run_id JOIN ws ON ws.id = r.workspace_id
RETURNING ` + stepColumns

// unreadableError names a leased run that this build cannot drive.
type unreadableError struct {
	runID string
	err   error
}

func (e *unreadableError) Error() string {
	return "run " + e.runID + " is unreadable: " + e.err.Error()
}
func (e *unreadableError) Unwrap() error { return e.err }

// lease takes up to limit runs that are due, closes what their former drivers left open as lost, resumes what was parked and opens the next
// attempt of the rest, in one transaction. bad are leased runs that cannot be driven.
func (c *Core) lease(ctx context.Context, owner string, length time.Duration, limit int, skip []string) (out []*held, bad []*unreadableError, err error) { //nolint:nonamedreturns // three values
	err = pg.InTx(ctx, c.db, func(ctx context.Context, tx pgx.Tx) error {
		out, bad = nil, nil
		var err error
		if out, bad, err = c.leaseRows(ctx, tx, owner, length, limit, skip); err != nil || len(out) == 0 {
			return err
		}
		return c.openAttempts(ctx, tx, out)
	})
	if err != nil {
		return nil, nil, err
	}
	if len(out) == 0 {
		return nil, bad, nil
	}
	c.stats.Leased.Add(int64(len(out)))
	c.appended.Notify()
	if c.onPoint != nil {
		for _, h := range out {
			if err := c.onPoint(ctx, "lease.opened", h.place()); err != nil {
				return nil, nil, err
			}
		}
	}
	return out, bad, c.point(ctx, "lease.after_commit", out[0].place())
}

func (c *Core) leaseRows(ctx context.Context, tx pgx.Tx, owner string, length time.Duration, limit int, skip []string) ([]*held, []*unreadableError, error) {
	rows, err := tx.Query(ctx, leaseSQL, owner, length.Seconds(), limit, c.registry.keys, append([]string{}, skip...))
	if err != nil {
		return nil, nil, fmt.Errorf("lease runs: %w", err)
	}
	defer rows.Close()
	var out []*held
	var bad []*unreadableError
	for rows.Next() {
		h := &held{outputs: map[string]json.RawMessage{}}
		var left float64
		if err := rows.Scan(join(h.run.targets(), []any{&left, &h.paused})...); err != nil {
			return nil, nil, &unreadableError{runID: h.run.ID, err: err}
		}
		h.runLeft, h.overdue = seconds(left), left <= 0
		if h.def, err = c.drivable(&h.run); err != nil {
			bad = append(bad, &unreadableError{runID: h.run.ID, err: err})
			continue
		}
		out = append(out, h)
	}
	if err := rows.Err(); err != nil {
		return nil, nil, fmt.Errorf("lease runs: %w", err)
	}
	return out, bad, nil
}

// drivable answers the definition by which this build drives a run, or why it cannot.
func (c *Core) drivable(r *Run) (*Definition, error) {
	def, ok := c.registry.Get(r.Definition, r.DefVersion)
	switch {
	case !ok:
		return nil, errors.New("its definition is not registered")
	case r.Step >= len(def.Steps) || !slices.Equal(r.StepNames, def.stepNames()):
		return nil, fmt.Errorf("its steps are not those of %s", key(def.Name, def.Version))
	}
	return def, nil
}

// Drives says whether this build could go on with a run: one that it put aside because it could not is helped by no further try.
func (c *Core) Drives(r *Run) bool {
	_, err := c.drivable(r)
	return err == nil
}

// openAttempts gives every leased run its open attempt. It runs in statements after the lease, so that they see what the former drivers
// committed before the lease got their rows' locks.
func (c *Core) openAttempts(ctx context.Context, tx pgx.Tx, leased []*held) error {
	byID := map[string]*held{}
	var seen []string // leased before: they may have attempts
	for _, h := range leased {
		byID[h.run.ID] = h
		if !firstLease(h) {
			seen = append(seen, h.run.ID)
		}
	}
	var j journal
	if len(seen) > 0 {
		lost, err := attempts(ctx, tx, lostSQL, seen)
		if err != nil {
			return err
		}
		for i := range lost {
			j.step(&lost[i])
		}
		c.stats.Lost.Add(int64(len(lost)))
		resumed, err := attempts(ctx, tx, resumeSQL, seen)
		if err != nil {
			return err
		}
		for i := range resumed {
			h := byID[resumed[i].RunID]
			if resumed[i].Step != h.run.Step || resumed[i].Dir != h.run.Phase {
				return &unreadableError{runID: h.run.ID, err: errors.New("its open attempt is not at its step")}
			}
			h.attempt = resumed[i]
			j.step(&resumed[i])
		}
		if err := c.loadOutputs(ctx, tx, seen, byID); err != nil {
			return err
		}
	}
	var runIDs, stepNames []string
	var budgets, stalls []float64
	for _, h := range leased {
		if h.attempt.RunID != "" {
			continue
		}
		s := h.step()
		runIDs, stepNames = append(runIDs, h.run.ID), append(stepNames, s.Name)
		budgets, stalls = append(budgets, s.Budget.Seconds()), append(stalls, c.stallAfter(h.def, s).Seconds())
	}
	if len(runIDs) > 0 {
		opened, err := attempts(ctx, tx, openSQL, runIDs, stepNames, budgets, stalls)
		if err != nil {
			return err
		}
		if len(opened) != len(runIDs) {
			return fmt.Errorf("open attempts: %d of %d", len(opened), len(runIDs))
		}
		for i := range opened {
			byID[opened[i].RunID].attempt = opened[i]
			j.step(&opened[i])
		}
	}
	for _, h := range leased {
		j.run(&h.run)
	}
	if err := j.flush(ctx, tx); err != nil {
		return err
	}
	return c.point(ctx, "lease.before_commit", leased[0].place())
}

// firstLease says whether nobody can have driven the run before: its fence is the first of its era.
func firstLease(h *held) bool { return h.run.Fence == 1 }

func attempts(ctx context.Context, tx pgx.Tx, sql string, args ...any) ([]Attempt, error) {
	rows, err := tx.Query(ctx, sql, args...)
	if err != nil {
		return nil, fmt.Errorf("change attempts: %w", err)
	}
	out, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (Attempt, error) {
		var a Attempt
		return a, row.Scan(a.targets()...)
	})
	if err != nil {
		return nil, fmt.Errorf("change attempts: %w", err)
	}
	return out, nil
}

func (c *Core) loadOutputs(ctx context.Context, tx pgx.Tx, runIDs []string, byID map[string]*held) error {
	rows, err := tx.Query(ctx, `SELECT s.run_id, s.name, s.output FROM lifecycle.saga_step s
		WHERE s.run_id = ANY ($1::uuid[]) AND s.dir = 'do' AND s.state = 'succeeded' AND s.output IS NOT NULL`, runIDs)
	if err != nil {
		return fmt.Errorf("load outputs: %w", err)
	}
	defer rows.Close()
	for rows.Next() {
		var id, name string
		var raw json.RawMessage
		if err := rows.Scan(&id, &name, &raw); err != nil {
			return fmt.Errorf("load outputs: %w", err)
		}
		byID[id].outputs[name] = raw
	}
	return rows.Err()
}

// releaseAll makes what owner holds due at once: at its start a driver holds nothing yet, and at its end nothing more. The attempts are closed
// as lost by whoever leases the runs next.
func (c *Core) releaseAll(ctx context.Context, owner string) (int64, error) {
	tag, err := c.db.Exec(ctx, `UPDATE lifecycle.saga_run r SET seal = NULL, next_at = mesh.clock(), lease_until = mesh.clock()
		WHERE r.owner = $1 AND r.state IN ('running', 'compensating')`, owner)
	if err != nil {
		return 0, fmt.Errorf("release leases of %s: %w", owner, err)
	}
	return tag.RowsAffected(), nil
}

// beforeStuck locks what comes before a run that is about to be stuck.
func (c *Core) beforeStuck(ctx context.Context, tx pgx.Tx, runID string) error {
	var workspaceID, name string
	err := tx.QueryRow(ctx, `SELECT r.workspace_id, r.definition FROM lifecycle.saga_run r WHERE r.id = $1`, runID).Scan(&workspaceID, &name)
	if err != nil {
		return fmt.Errorf("read run %s: %w", runID, err)
	}
	if def, ok := c.registry.Newest(name); ok && def.BeforeStuck != nil {
		if err := def.BeforeStuck(ctx, tx, workspaceID); err != nil {
			return fmt.Errorf("lock what the run holds: %w", err)
		}
	}
	return nil
}

// quarantine takes one unreadable run out of the queue so that it stops nobody else: it ends `stuck`, says why, and an operator decides.
func (c *Core) quarantine(ctx context.Context, runID, why string) error {
	err := pg.InTx(ctx, c.db, func(ctx context.Context, tx pgx.Tx) error {
		if err := c.beforeStuck(ctx, tx, runID); err != nil {
			return err
		}
		r := &Run{}
		err := tx.QueryRow(ctx, `UPDATE lifecycle.saga_run r SET seal = NULL, state = 'stuck', owner = NULL, lease_until = NULL,
				stuck_reason = 'unreadable: ' || $2::text, why_waiting = 'waiting for an operator: ' || $2::text, version = r.version + 1
			WHERE r.id = $1 AND r.state IN ('pending', 'running', 'waiting', 'compensating') RETURNING `+runColumns, runID, why).Scan(r.targets()...)
		if err != nil {
			return fmt.Errorf("quarantine run: %w", err)
		}
		_, err = tx.Exec(ctx, `UPDATE lifecycle.saga_step s SET state = 'lost', finished_at = mesh.clock(), outcome = 'lost', version = s.version + 1
			WHERE s.run_id = $1 AND s.state IN ('running', 'waiting')`, runID)
		if err != nil {
			return fmt.Errorf("close attempt: %w", err)
		}
		_, err = tx.Exec(ctx, `UPDATE lifecycle.workspace w SET seal = NULL, state = 'stuck', state_at = mesh.clock(), last_error_code = 'unreadable', last_error = $2,
			version = w.version + 1 WHERE w.run_id = $1`, runID, why)
		if err != nil {
			return fmt.Errorf("mark workspace: %w", err)
		}
		// Whoever holds something for it learns of it as of any run that is stuck: by its definition, or by the newest of that name.
		def, ok := c.registry.Get(r.Definition, r.DefVersion)
		if !ok {
			def, ok = c.registry.Newest(r.Definition)
		}
		if ok && def.OnStuck != nil {
			public := "its run is unreadable: " + why
			e := &StepError{Layer: commonv1.OwnerLayer_OWNER_LAYER_WORKFLOW, Reason: commonv1.Reason_REASON_INTERNAL, Public: public}
			if err := def.OnStuck(ctx, tx, r.WorkspaceID, e); err != nil {
				return fmt.Errorf("tell of stuck run: %w", err)
			}
		}
		var j journal
		j.run(r)
		j.decided(ctx, r)
		if w, err := GetWorkspace(ctx, tx, r.WorkspaceID); err == nil {
			// A workspace that cannot be shown is announced by the run alone.
			_ = j.workspace(&w)
		}
		return j.flush(ctx, tx)
	})
	if err != nil {
		return fmt.Errorf("quarantine run %s: %w", runID, err)
	}
	c.stats.Quarantined.Add(1)
	return nil
}
