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

// stepOutput is the output that a step which has succeeded left for later ones.
type stepOutput struct {
	RunID  string          `db:"run_id"`
	Name   string          `db:"name"`
	Output json.RawMessage `db:"output"`
}

// lostAttempt is the SET list that closes an attempt whose driver lost its lease.
const lostAttempt = `state = 'lost', finished_at = mesh.clock(), outcome = 'lost', why_waiting = '',
	error = 'its driver lost the lease', error_code = '', error_layer = '', cause = '', last_output = ''`
