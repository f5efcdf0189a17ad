package runs

import (
	"cmp"
	"encoding/json"
	"time"

	"google.golang.org/protobuf/types/known/structpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/aside"
	"github.com/gpuaas/mesh/internal/names"
)

func timestamp(t *time.Time) *timestamppb.Timestamp {
	if t == nil || t.IsZero() {
		return nil
	}
	return timestamppb.New(*t)
}

// Proto returns the run as the API and its event show it.
func (r *Run) Proto() *lifecyclev1.Run {
	return &lifecyclev1.Run{
		RunId: r.ID, WorkspaceId: r.WorkspaceID, TenantId: r.TenantID, Kind: r.OperationKind(),
		Definition: r.Definition,
		// small counts
		DefVersion: int32(r.DefVersion), Round: int32(r.Round), ParentRunId: r.ParentRunID,
		State: aside.Value[commonv1.RunState]("run", r.ID, r.State),
		// small counts
		Phase: r.Phase, Step: int32(r.Step), Epoch: r.Epoch, Fence: r.Fence, Owner: r.Owner,
		HeartbeatAt: timestamp(r.HeartbeatAt), ProgressAt: timestamp(r.ProgressAt), NextAt: timestamp(&r.NextAt),
		DeadlineAt: timestamp(r.DeadlineAt), CancelRequestedAt: timestamp(r.CancelAt), CancelBy: r.CancelBy,
		CancelReason: r.CancelReason, StuckReason: r.StuckReason, WhyWaiting: r.WhyWaiting, ErrorCode: r.ErrorCode,
		Error: r.Error, ErrorLayer: aside.Value[commonv1.OwnerLayer]("run", r.ID, r.ErrorLayer),
		CreatedAt:  timestamp(&r.CreatedAt),
		FinishedAt: timestamp(r.FinishedAt), CorrelationId: r.CorrelationID, Version: r.Version, StepNames: r.StepNames,
		Requester: r.Requester,
	}
}

// Proto returns the attempt as the timeline shows it.
func (a *Attempt) Proto() *lifecyclev1.StepAttempt {
	return &lifecyclev1.StepAttempt{
		// small counts
		RunId: a.RunID, WorkspaceId: a.WorkspaceID, Step: int32(a.Step), Name: a.Name,
		Direction: aside.Value[commonv1.Direction]("run", a.RunID, a.Dir),
		// small counts
		Attempt: int32(a.Attempt), State: aside.Value[commonv1.AttemptState]("run", a.RunID, a.State),
		Fence: a.Fence, OpSeq: a.OpSeq,
		StartedAt: timestamp(&a.StartedAt), HeartbeatAt: timestamp(a.HeartbeatAt), ProgressAt: timestamp(a.ProgressAt),
		Progress: a.Progress, FinishedAt: timestamp(a.FinishedAt), ErrorCode: a.ErrorCode, Error: a.Error,
		ErrorLayer: aside.Value[commonv1.OwnerLayer]("run", a.RunID, a.ErrorLayer), Stalled: a.Stalled,
		WhyWaiting: a.WhyWaiting,
		Output:     outputStruct(a.Output), Version: a.Version, Cause: a.Cause,
		LastOutput: a.LastOutput, Stage: a.Stage,
	}
}

// outputStruct converts an output that is a JSON object; any other value becomes the field `value`. It returns nil if
// raw is empty or is not JSON.
func outputStruct(raw json.RawMessage) *structpb.Struct {
	if len(raw) == 0 {
		return nil
	}
	var value any
	if json.Unmarshal(raw, &value) != nil {
		return nil
	}
	object, ok := value.(map[string]any)
	if !ok {
		object = map[string]any{"value": value}
	}
	s, err := structpb.NewStruct(object)
	if err != nil {
		return nil
	}
	return s
}

// OperationKind returns the kind of the run; unspecified for one that this build does not know.
func (r *Run) OperationKind() commonv1.OperationKind {
	return aside.Value[commonv1.OperationKind]("run", r.ID, r.Kind)
}

// Direction returns the phase of the run.
func (r *Run) Direction() commonv1.Direction {
	return aside.Value[commonv1.Direction]("run", r.ID, r.Phase)
}

// Unread returns an error about the first value of the run that this build does not know.
func (r *Run) Unread() error {
	_, kind := names.Parse[commonv1.OperationKind](r.Kind)
	_, state := names.Parse[commonv1.RunState](r.State)
	_, phase := names.Parse[commonv1.Direction](r.Phase)
	return cmp.Or(kind, state, phase)
}
