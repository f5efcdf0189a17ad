package saga

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/events"
)

// eventBuffer collects the rows that a transaction changed, and appends their events in one statement at its end.
// Attempts that change together with their run travel in the run's event.
type eventBuffer struct {
	list []events.Event
	runs map[string]*lifecyclev1.Run
	lone []*Attempt // attempts whose run has not been collected
}

func (j *eventBuffer) run(r *Run) {
	payload := r.Proto()
	if j.runs == nil {
		j.runs = map[string]*lifecyclev1.Run{}
	}
	if before := j.runs[r.ID]; before != nil {
		payload.ChangedSteps = before.GetChangedSteps()
		before.ChangedSteps = nil
	}
	j.runs[r.ID] = payload
	rest := j.lone[:0]
	for _, a := range j.lone {
		if a.RunID == r.ID {
			payload.ChangedSteps = append(payload.ChangedSteps, a.Proto())
		} else {
			rest = append(rest, a)
		}
	}
	j.lone = rest
	j.list = append(j.list, events.Event{
		Kind: "run.changed", AggregateType: "run", AggregateID: r.ID, AggregateVersion: r.Version, Payload: payload,
		Correlation: events.Correlation{
			CorrelationID: r.CorrelationID, TenantID: r.TenantID, WorkspaceID: r.WorkspaceID,
			WorkflowID: r.ID,
		},
	})
}

func (j *eventBuffer) step(a *Attempt) {
	if run := j.runs[a.RunID]; run != nil {
		run.ChangedSteps = append(run.ChangedSteps, a.Proto())
		return
	}
	copied := *a
	j.lone = append(j.lone, &copied)
}

func stepEvent(a *Attempt) events.Event {
	return events.Event{
		Kind: "step.changed", AggregateType: "step",
		AggregateID: fmt.Sprintf("%s/%d/%s/%d", a.RunID, a.Step, a.Dir, a.Attempt), AggregateVersion: a.Version,
		Payload:     a.Proto(),
		Correlation: events.Correlation{TenantID: a.TenantID, WorkspaceID: a.WorkspaceID, WorkflowID: a.RunID},
	}
}

func (j *eventBuffer) workspace(w *Workspace) error {
	payload, err := w.Proto()
	if err != nil {
		return err
	}
	j.list = append(j.list, events.Event{
		Kind: "workspace.changed", AggregateType: "workspace", AggregateID: w.ID, AggregateVersion: w.Version,
		Payload:     payload,
		Correlation: events.Correlation{TenantID: w.TenantID, WorkspaceID: w.ID, WorkflowID: w.RunID, NodeID: w.NodeID},
	})
	return nil
}

// flush appends the collected events. The caller gets no position token to wait for.
func (j *eventBuffer) flush(ctx context.Context, tx pgx.Tx) error {
	list := j.take()
	if len(list) == 0 {
		return nil
	}
	_, err := events.Append(ctx, tx, list...)
	return err
}

// flushPos is flush for a command that returns a position token: the id of the last event.
func (j *eventBuffer) flushPos(ctx context.Context, tx pgx.Tx) (string, error) {
	list := j.take()
	if len(list) == 0 {
		return "", nil
	}
	list[len(list)-1].Unnamed = false
	return events.Append(ctx, tx, list...)
}

// take returns the collected events, each marked as unnamed, and empties the buffer.
func (j *eventBuffer) take() []events.Event {
	for _, a := range j.lone {
		j.list = append(j.list, stepEvent(a))
	}
	list := j.list
	for i := range list {
		list[i].Unnamed = true
	}
	j.list, j.lone, j.runs = nil, nil, nil
	return list
}
