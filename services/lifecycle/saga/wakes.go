package saga

import (
	"context"
	"fmt"
	"sync/atomic"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/pg"
)

// Wakes wakes parked runs, and notifies the drivers and the sequencer of this process of what transactions have made
// due. It knows neither steps nor drivers, so that steps, and the services that they call, have it before there is a
// core.
type Wakes struct {
	runnable events.Signal  // a run may be leased
	cancels  events.Signal  // a run of which a driver here may hold the lease was cancelled
	appended *events.Signal // events were appended
	// cancelled is true if a cancel was written in a transaction for which Committed was not called yet, unless the
	// Committed of another transaction has reset it.
	cancelled atomic.Bool
	// unhooked is true once a transaction without an end hook (pg.OnEnd) has made runs due: the drivers do not learn of
	// its commit, so that every Committed wakes them.
	unhooked atomic.Bool
}

// NewWakes returns wakes that notify appended, the sequencer's Wake, after every commit that appended events; it may be
// nil.
func NewWakes(appended *events.Signal) *Wakes { return &Wakes{appended: appended} }

// Runnable returns the signal that a run may be leased.
func (w *Wakes) Runnable() *events.Signal { return &w.runnable }

// Cancels returns the signal that a run was cancelled of which a driver of this process may hold the lease.
func (w *Wakes) Cancels() *events.Signal { return &w.cancels }

// Appended returns the signal that events were appended, which wakes the sequencer. It may be nil.
func (w *Wakes) Appended() *events.Signal { return w.appended }

// Committed is called after a commit that started, woke or changed a run: it wakes the sequencer of this process, and
// the drivers if their wake is not hooked to the end of the transaction.
func (w *Wakes) Committed() {
	if w.unhooked.Load() {
		w.runnable.Notify()
	}
	if !w.cancelled.Swap(false) {
		w.appended.Notify()
		return
	}
	w.cancels.Notify()
	w.appended.Urge() // the replica that drives the run learns of its cancel by the event's number
}

// makesDue wakes the drivers of this process once tx, in which a run became due, is committed. If tx takes no end hook,
// Committed wakes them instead, after this and every later commit.
func (w *Wakes) makesDue(tx pgx.Tx) {
	hooked := pg.OnEnd(tx, func(committed bool) {
		if committed {
			w.runnable.Notify()
		}
	})
	if !hooked {
		w.unhooked.Store(true)
	}
}

// Wake signals these runs: a parked run that can be woken becomes due at once, and a leased run that parks with
// WakeOnSignal is due again at once. It never takes a lease from a driver. The caller calls it in the transaction of
// the change that the runs wait for, as its last lock, and calls Committed after the commit.
func (w *Wakes) Wake(ctx context.Context, tx pgx.Tx, runIDs ...string) error {
	return w.wake(ctx, tx, wakeRuns, runIDs)
}

// WakeWorkspaces is Wake for the open runs of these workspaces.
func (w *Wakes) WakeWorkspaces(ctx context.Context, tx pgx.Tx, workspaceIDs ...string) error {
	return w.wake(ctx, tx, wakeRunsOfWorkspaces, workspaceIDs)
}

func (w *Wakes) wake(ctx context.Context, tx pgx.Tx, change *pg.Statement, ids []string) error {
	if len(ids) == 0 {
		return nil
	}
	if _, err := pg.Exec(ctx, tx, change, ids); err != nil {
		return fmt.Errorf("wake runs: %w", err)
	}
	w.makesDue(tx)
	return nil
}

// wakeSQL wakes the runs whose column is one of $1.
func wakeSQL(column string) string {
	return `
		WITH due AS (SELECT r.id FROM lifecycle.saga_run r WHERE r.` + column + ` = ANY ($1::uuid[])
			AND r.state IN ('pending', 'running', 'waiting', 'compensating') ORDER BY r.id FOR NO KEY UPDATE)
		UPDATE lifecycle.saga_run r SET signal = r.signal + 1,
			next_at = CASE WHEN r.owner IS NULL AND r.wakeable THEN LEAST(r.next_at, mesh.clock()) ELSE r.next_at END
		FROM due WHERE r.id = due.id`
}
