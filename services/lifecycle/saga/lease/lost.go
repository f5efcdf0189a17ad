package lease

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
)

// loseUnreadable handles leased runs that this build cannot drive: it closes the attempts that their former drivers
// left open as lost, and takes back the attempts that the lease opened.
func loseUnreadable(ctx context.Context, tx pgx.Tx, bad []*unreadableError) error {
	if len(bad) == 0 {
		return nil
	}
	var lost runs.Lost
	runIDs := make([]string, len(bad))
	for i, b := range bad {
		runIDs[i] = b.runID
		lost.Add(b.runID, b.former.attempt, b.former.fence, b.former.since)
	}
	closed, err := lost.Close(ctx, tx)
	if err != nil {
		return err
	}
	if err := pg.Queue(ctx, tx, dropOpen, runIDs); err != nil {
		return fmt.Errorf("take back attempts: %w", err)
	}
	var buffer runs.Buffer
	for i := range closed {
		buffer.Attempt(&closed[i])
	}
	return buffer.Flush(ctx, tx)
}

// takeOver closes the attempts that the former drivers of leased runs left open as lost, and resumes parked attempts. A
// run that was never leased before has its first attempt already.
func (k *Keeper) takeOver(ctx context.Context, tx pgx.Tx, leased []*Run, buffer *runs.Buffer) error {
	byID := map[string]*Run{}
	var seen []string
	var lost runs.Lost
	for _, h := range leased {
		byID[h.Run.ID] = h
		if h.Run.OpenAttempt > 0 {
			continue
		}
		seen = append(seen, h.Run.ID)
		lost.Add(h.Run.ID, h.former.attempt, h.former.fence, h.former.since)
	}
	if len(seen) == 0 {
		return nil
	}
	closed, err := runs.ChangeAttempts(ctx, tx, loseAttempts, seen)
	if err != nil {
		return err
	}
	unkept, err := lost.Close(ctx, tx)
	if err != nil {
		return err
	}
	closed = append(closed, unkept...)
	for i := range closed {
		buffer.Attempt(&closed[i])
	}
	k.core.Stats().Lost.Add(int64(len(closed)))
	resumed, err := runs.ChangeAttempts(ctx, tx, resumeAttempts, seen)
	if err != nil {
		return err
	}
	for i := range resumed {
		h := byID[resumed[i].RunID]
		if resumed[i].Step != h.Run.Step || resumed[i].Dir != h.Run.Phase {
			return &unreadableError{runID: h.Run.ID, err: errors.New("its open attempt is not at its step")}
		}
		h.Attempt = resumed[i]
		buffer.Attempt(&resumed[i])
	}
	return k.loadOutputs(ctx, tx, seen, byID)
}

func (k *Keeper) loadOutputs(ctx context.Context, tx pgx.Tx, runIDs []string, byID map[string]*Run) error {
	outputs, err := pg.All[stepOutput](ctx, tx, stepOutputs, runIDs)
	if err != nil {
		return fmt.Errorf("load outputs: %w", err)
	}
	for _, o := range outputs {
		byID[o.RunID].Outputs[o.Name] = o.Output
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
