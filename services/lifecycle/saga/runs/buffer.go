package runs

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/services/lifecycle/workspace"
)

// Buffer collects the rows that a transaction changed, and appends their events in one statement at its end.
// Attempts that change together with their run travel in the run's event.
type Buffer struct {
	list []events.Event
	runs map[string]*lifecyclev1.Run
	lone []*Attempt // attempts whose run has not been collected
}

// Run collects a run's row.
func (b *Buffer) Run(r *Run) {
	payload := r.Proto()
	if b.runs == nil {
		b.runs = map[string]*lifecyclev1.Run{}
	}
	if before := b.runs[r.ID]; before != nil {
		payload.ChangedSteps = before.GetChangedSteps()
		before.ChangedSteps = nil
	}
	b.runs[r.ID] = payload
	rest := b.lone[:0]
	for _, a := range b.lone {
		if a.RunID == r.ID {
			payload.ChangedSteps = append(payload.ChangedSteps, a.Proto())
		} else {
			rest = append(rest, a)
		}
	}
	b.lone = rest
	b.list = append(b.list, events.Event{
		Kind: "run.changed", AggregateType: "run", AggregateID: r.ID, AggregateVersion: r.Version, Payload: payload,
		Correlation: events.Correlation{
			CorrelationID: r.CorrelationID, TenantID: r.TenantID, WorkspaceID: r.WorkspaceID,
			WorkflowID: r.ID,
		},
	})
}

// Attempt collects the row of an attempt. It travels in the event of its run, if that is collected as well.
func (b *Buffer) Attempt(a *Attempt) {
	if run := b.runs[a.RunID]; run != nil {
		run.ChangedSteps = append(run.ChangedSteps, a.Proto())
		return
	}
	copied := *a
	b.lone = append(b.lone, &copied)
}

func stepEvent(a *Attempt) events.Event {
	return events.Event{
		Kind: "step.changed", AggregateType: "step",
		AggregateID: fmt.Sprintf("%s/%d/%s/%d", a.RunID, a.Step, a.Dir, a.Attempt), AggregateVersion: a.Version,
		Payload:     a.Proto(),
		Correlation: events.Correlation{TenantID: a.TenantID, WorkspaceID: a.WorkspaceID, WorkflowID: a.RunID},
	}
}

// Workspace collects a workspace's row.
func (b *Buffer) Workspace(w *workspace.Row) error {
	e, err := w.Event()
	if err != nil {
		return err
	}
	b.list = append(b.list, e)
	return nil
}

// Touch changes workspaces beside their runs, and collects their rows.
func (b *Buffer) Touch(ctx context.Context, tx pgx.Tx, changes ...workspace.Change) error {
	changed, err := workspace.Touch(ctx, tx, changes)
	if err != nil {
		return err
	}
	for i := range changed {
		if err := b.Workspace(&changed[i]); err != nil {
			return err
		}
	}
	return nil
}

// Flush appends the collected events. The caller gets no position token to wait for.
func (b *Buffer) Flush(ctx context.Context, tx pgx.Tx) error {
	list := b.take()
	if len(list) == 0 {
		return nil
	}
	_, err := events.Append(ctx, tx, list...)
	return err
}

// FlushPos is Flush for a command that returns a position token: the id of the last event.
func (b *Buffer) FlushPos(ctx context.Context, tx pgx.Tx) (string, error) {
	list := b.take()
	if len(list) == 0 {
		return "", nil
	}
	list[len(list)-1].Unnamed = false
	return events.Append(ctx, tx, list...)
}

// take returns the collected events, each marked as unnamed, and empties the buffer.
func (b *Buffer) take() []events.Event {
	for _, a := range b.lone {
		b.list = append(b.list, stepEvent(a))
	}
	list := b.list
	for i := range list {
		list[i].Unnamed = true
	}
	b.list, b.lone, b.runs = nil, nil, nil
	return list
}
