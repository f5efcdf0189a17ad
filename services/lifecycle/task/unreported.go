package task

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/pg"
)

// A lease appends no event: the report of the attempt follows within milliseconds as a rule, and its event carries the
// transition to dispatched too. A lease leaves offered_at equal to state_at, and everything that reports the row moves
// offered_at away from it. A lease that is still unreported is reported when the task is offered again, two seconds
// later, when the gate of its node shuts, or by the sweep, which may end the task by the same event.

// OfferAgainAfter is how long a task may be offered and undelivered before the same session is offered it again.
const OfferAgainAfter = "2 seconds"

// MarkReported is the SET expression that records that an event reports the row.
const MarkReported = `offered_at = t.offered_at + interval '1 microsecond'`

// unreportedSet is the condition that selects the tasks whose lease is to be reported.
type unreportedSet string

const (
	unreportedOfNode unreportedSet = `t.node_id = $1 ORDER BY t.task_id FOR UPDATE`
	unreportedOfAll  unreportedSet = `t.offered_at < mesh.clock() - interval '` + OfferAgainAfter + `'
				ORDER BY t.task_id LIMIT $1 FOR UPDATE SKIP LOCKED`
)

// Leased returns the transition of a lease.
func (r Row) Leased(at time.Time) *lifecyclev1.TaskTransition {
	out := r.Transition(commonv1.TaskState_TASK_STATE_DISPATCHED, "")
	out.At = timestamppb.New(at)
	return out
}

// WithLease returns next, preceded by the transition of the lease if no event has reported the row's lease yet.
func (r Row) WithLease(next *lifecyclev1.TaskTransition) []*lifecyclev1.TaskTransition {
	if !r.Unreported {
		return []*lifecyclev1.TaskTransition{next}
	}
	return []*lifecyclev1.TaskTransition{r.Leased(r.StateAt), next}
}

// reportRows appends the events of the leases that a statement marked as reported, and returns how many.
func reportRows(ctx context.Context, tx pgx.Tx, statement *pg.Statement, arg any) (int, error) {
	list, err := All(ctx, tx, statement, arg)
	if err != nil || len(list) == 0 {
		return 0, wrapReported(err)
	}
	evs := make([]events.Event, len(list))
	for i, r := range list {
		evs[i] = r.Event()
	}
	_, err = events.Append(ctx, tx, evs...)
	return len(list), wrapReported(err)
}

func wrapReported(err error) error {
	if err != nil {
		return fmt.Errorf("report leased tasks: %w", err)
	}
	return nil
}

// ReportLeases appends the events of at most so many leases that no event has reported for a while, and returns how
// many.
func ReportLeases(ctx context.Context, tx pgx.Tx, most int) (int, error) {
	return reportRows(ctx, tx, reportLeased.For(unreportedOfAll), most)
}

// ReportLeasesOf appends the events of the leases of a node that no event has reported, and returns how many.
func ReportLeasesOf(ctx context.Context, tx pgx.Tx, nodeID string) (int, error) {
	return reportRows(ctx, tx, reportLeased.For(unreportedOfNode), nodeID)
}
