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

// unreadableError names a leased run that this build cannot drive.
type unreadableError struct {
	runID  string
	err    error
	former formerLease
}

func (e *unreadableError) Error() string {
	return "run " + e.runID + " is unreadable: " + e.err.Error()
}
func (e *unreadableError) Unwrap() error { return e.err }

// lease leases up to limit runs that are due, in one transaction: it closes the attempts that their former drivers left
// open as lost, resumes parked attempts and opens the next attempt of the other runs. bad are leased runs that cannot
// be driven.
//
//nolint:nonamedreturns // three values
func (c *Core) lease(ctx context.Context, owner string, length time.Duration, limit int,
	skip []string,
) (out []*leasedRun, bad []*unreadableError, err error) {
	err = pg.InTx(ctx, c.db, func(ctx context.Context, tx pgx.Tx) error {
		out, bad = nil, nil
		var err error
		if out, bad, err = c.leaseRows(ctx, tx, owner, length, limit, skip); err != nil {
			return err
		}
		if err := loseUnreadable(ctx, tx, bad); err != nil || len(out) == 0 {
			return err
		}
		return c.openAttempts(ctx, tx, out)
	})
	if err != nil {
		return nil, nil, err
	}
	if len(out)+len(bad) > 0 {
		c.appended.Notify()
	}
	if len(out) == 0 {
		return nil, bad, nil
	}
	c.stats.Leased.Add(int64(len(out)))
	if c.onPoint != nil {
		for _, h := range out {
			if err := c.onPoint(ctx, "lease.opened", h.place()); err != nil {
				return nil, nil, err
			}
		}
	}
	return out, bad, c.point(ctx, "lease.after_commit", out[0].place())
}

func (c *Core) leaseRows(ctx context.Context, tx pgx.Tx, owner string, length time.Duration, limit int,
	skip []string,
) ([]*leasedRun, []*unreadableError, error) {
	rows, err := pg.Query(ctx, tx, leaseRuns, owner, length.Seconds(), limit, c.registry.keys, append([]string{}, skip...))
	if err != nil {
		return nil, nil, fmt.Errorf("lease runs: %w", err)
	}
	defer rows.Close()
	var out []*leasedRun
	var bad []*unreadableError
	for rows.Next() {
		h := &leasedRun{outputs: map[string]json.RawMessage{}}
		var left float64
		if err := rows.Scan(join(targets(&h.run),
			[]any{&left, &h.paused, &h.former.fence, &h.former.attempt, &h.former.since, &h.outdrawn})...); err != nil {
			return nil, nil, &unreadableError{runID: h.run.ID, err: err}
		}
		h.runLeft, h.overdue = seconds(left), left <= 0
		if h.outdrawn {
			// the open attempt is a row written by the build that drew the numbers; the columns in the run's row are older
			h.former = formerLease{}
		}
		if h.def, err = c.drivable(&h.run); err != nil {
			bad = append(bad, &unreadableError{runID: h.run.ID, err: err, former: h.former})
			continue
		}
		out = append(out, h)
	}
	if err := rows.Err(); err != nil {
		return nil, nil, fmt.Errorf("lease runs: %w", err)
	}
	return out, bad, nil
}

// drivable returns the definition by which this build drives a run, or why it cannot.
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

// Drives reports whether this build can drive a run. Trying again does not help a run that it cannot drive.
func (c *Core) Drives(r *Run) bool {
	_, err := c.drivable(r)
	return err == nil
}

// formerLease is the attempt that the previous lease of a run left open in the run's row.
type formerLease struct {
	fence   int64
	attempt int // 0: nothing
	since   *time.Time
}

// lostOpen collects the arguments of loseOpen.
type lostOpen struct {
	runs     []string
	attempts []int32
	fences   []int64
	since    []*time.Time
}

func (l *lostOpen) add(runID string, former formerLease) {
	if former.attempt == 0 {
		return
	}
	l.runs, l.attempts = append(l.runs, runID), append(l.attempts, int32(former.attempt)) //nolint:gosec // small counts
	l.fences, l.since = append(l.fences, former.fence), append(l.since, former.since)
}

// close closes the collected attempts as lost, by inserting their rows, and returns these.
func (l *lostOpen) close(ctx context.Context, tx pgx.Tx) ([]Attempt, error) {
	if len(l.runs) == 0 {
		return nil, nil
	}
	return attempts(ctx, tx, loseOpen, l.runs, l.attempts, l.fences, l.since)
}

// loseUnreadable handles leased runs that this build cannot drive: it closes the attempts that their former drivers
// left open as lost, and takes back the attempts that the lease opened.
func loseUnreadable(ctx context.Context, tx pgx.Tx, bad []*unreadableError) error {
	if len(bad) == 0 {
		return nil
	}
	var lost lostOpen
	runIDs := make([]string, len(bad))
	for i, b := range bad {
		runIDs[i] = b.runID
		lost.add(b.runID, b.former)
	}
	closed, err := lost.close(ctx, tx)
	if err != nil {
		return err
	}
	if err := pg.Queue(ctx, tx, dropOpen, runIDs); err != nil {
		return fmt.Errorf("take back attempts: %w", err)
	}
	var j eventBuffer
	for i := range closed {
		j.step(&closed[i])
	}
	return j.flush(ctx, tx)
}

// openAttempts gives every leased run its open attempt. It runs in statements after the lease, so that they see what
// the former drivers committed before the lease got their rows' locks.
func (c *Core) openAttempts(ctx context.Context, tx pgx.Tx, leased []*leasedRun) error {
	var j eventBuffer
	if err := c.takeOver(ctx, tx, leased, &j); err != nil {
		return err
	}
	byID := map[string]*Run{}
	var toOpen, outdrawn []string
	runs := make([]*Run, 0, len(leased))
	for _, h := range leased {
		if h.outdrawn {
			outdrawn = append(outdrawn, h.run.ID)
			h.run.OpSeq = h.run.OpLast
		}
		if h.attempt.RunID == "" && h.run.OpenAttempt == 0 {
			toOpen = append(toOpen, h.run.ID)
		}
		byID[h.run.ID] = &h.run
		runs = append(runs, &h.run)
	}
	if len(outdrawn) > 0 {
		// A build without ranges has driven them meanwhile: the rest of their ranges is below the numbers that it has drawn.
		if err := pg.Queue(ctx, tx, useUpRange, outdrawn); err != nil {
			return fmt.Errorf("use up ranges: %w", err)
		}
	}
	if len(toOpen) > 0 {
		if err := opened(ctx, tx, insertAttempts, toOpen, byID); err != nil {
			return err
		}
	}
	if err := c.drawRanges(ctx, tx, runs); err != nil {
		return err
	}
	for _, h := range leased {
		if h.attempt.RunID == "" {
			h.openIn()
			j.step(&h.attempt)
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

// takeOver closes the attempts that the former drivers of leased runs left open as lost, and resumes parked attempts. A
// run that was never leased before has its first attempt already.
func (c *Core) takeOver(ctx context.Context, tx pgx.Tx, leased []*leasedRun, j *eventBuffer) error {
	byID := map[string]*leasedRun{}
	var seen []string
	var lost lostOpen
	for _, h := range leased {
		byID[h.run.ID] = h
		if h.run.OpenAttempt > 0 {
			continue
		}
		seen = append(seen, h.run.ID)
		lost.add(h.run.ID, h.former)
	}
	if len(seen) == 0 {
		return nil
	}
	closed, err := attempts(ctx, tx, loseAttempts, seen)
	if err != nil {
		return err
	}
	unkept, err := lost.close(ctx, tx)
	if err != nil {
		return err
	}
	closed = append(closed, unkept...)
	for i := range closed {
		j.step(&closed[i])
	}
	c.stats.Lost.Add(int64(len(closed)))
	resumed, err := attempts(ctx, tx, resumeAttempts, seen)
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
	return c.loadOutputs(ctx, tx, seen, byID)
}

func attempts(ctx context.Context, tx pgx.Tx, change *pg.Statement, args ...any) ([]Attempt, error) {
	out, err := pg.All[Attempt](ctx, tx, change, args...)
	if err != nil {
		return nil, fmt.Errorf("change attempts: %w", err)
	}
	return out, nil
}

func (c *Core) loadOutputs(ctx context.Context, tx pgx.Tx, runIDs []string, byID map[string]*leasedRun) error {
	outputs, err := pg.All[stepOutput](ctx, tx, stepOutputs, runIDs)
	if err != nil {
		return fmt.Errorf("load outputs: %w", err)
	}
	for _, o := range outputs {
		byID[o.RunID].outputs[o.Name] = o.Output
	}
	return nil
}

// releaseAll makes the runs that owner has leased due at once. A driver calls it when it drives nothing: at its start
// and at its end. The driver that leases the runs next closes their attempts as lost.
func (c *Core) releaseAll(ctx context.Context, owner string) (int64, error) {
	tag, err := pg.Exec(ctx, c.db, releaseOwned, owner)
	if err != nil {
		return 0, fmt.Errorf("release leases of %s: %w", owner, err)
	}
	return tag.RowsAffected(), nil
}

// beforeStuck calls the definition's BeforeStuck, which locks the rows that come before the run in the order of locks.
func (c *Core) beforeStuck(ctx context.Context, tx pgx.Tx, runID string) error {
	var workspaceID, name string
	err := pg.QueryRow(ctx, tx, runDefinition, runID).Scan(&workspaceID, &name)
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

// quarantine takes one unreadable run out of the queue, so that it does not block the leasing of others: the run
// becomes `stuck` with the reason why, and an operator decides.
func (c *Core) quarantine(ctx context.Context, runID, why string) error {
	err := pg.InTx(ctx, c.db, func(ctx context.Context, tx pgx.Tx) error {
		if err := c.beforeStuck(ctx, tx, runID); err != nil {
			return err
		}
		for _, s := range []*pg.Statement{lockRuns, keepOpen} {
			if err := pg.Queue(ctx, tx, s, []string{runID}); err != nil {
				return fmt.Errorf("lock run: %w", err)
			}
		}
		r, err := pg.One[Run](ctx, tx, quarantineRun, runID, why)
		if err != nil {
			return fmt.Errorf("quarantine run: %w", err)
		}
		closed, err := attempts(ctx, tx, loseOpenAttempts, runID)
		if err != nil {
			return err
		}
		_, err = pg.Exec(ctx, tx, quarantineWorkspace, runID, why)
		if err != nil {
			return fmt.Errorf("mark workspace: %w", err)
		}
		// OnStuck is called as for any run that is stuck: that of its definition, or of the newest definition of that name.
		def, ok := c.registry.Get(r.Definition, r.DefVersion)
		if !ok {
			def, ok = c.registry.Newest(r.Definition)
		}
		if ok && def.OnStuck != nil {
			public := "its run is unreadable: " + why
			e := &StepError{
				Layer: commonv1.OwnerLayer_OWNER_LAYER_WORKFLOW, Reason: commonv1.Reason_REASON_INTERNAL,
				Public: public,
			}
			if err := def.OnStuck(ctx, tx, r.WorkspaceID, e); err != nil {
				return fmt.Errorf("tell of stuck run: %w", err)
			}
		}
		var j eventBuffer
		j.run(&r)
		for i := range closed {
			j.step(&closed[i])
		}
		j.decided(ctx, &r)
		if w, err := GetWorkspace(ctx, tx, r.WorkspaceID); err == nil {
			// A workspace that cannot be shown is announced by the run alone.
			_ = j.workspace(&w)
		}
		return j.flush(ctx, tx)
	})
	if err != nil {
		return fmt.Errorf("quarantine run %s: %w", runID, err)
	}
	c.appended.Notify()
	c.stats.Quarantined.Add(1)
	return nil
}
