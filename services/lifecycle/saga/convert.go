package saga

import (
	"encoding/json"
	"fmt"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/structpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/secretenv"
)

func timestamp(t *time.Time) *timestamppb.Timestamp {
	if t == nil || t.IsZero() {
		return nil
	}
	return timestamppb.New(*t)
}

// spelled parses an enum whose column a CHECK constrains. An unknown value becomes the zero value, unspecified.
func spelled[E protoreflect.Enum](s string) E {
	var zero E
	if s == "" {
		return zero
	}
	e, err := names.Parse[E](s)
	if err != nil {
		return zero
	}
	return e
}

// Proto returns the run as the API and its event show it.
func (r *Run) Proto() *lifecyclev1.Run {
	return &lifecyclev1.Run{
		RunId: r.ID, WorkspaceId: r.WorkspaceID, TenantId: r.TenantID, Kind: spelled[commonv1.OperationKind](r.Kind),
		Definition: r.Definition,
		//nolint:gosec // small counts
		DefVersion: int32(r.DefVersion), Round: int32(r.Round), ParentRunId: r.ParentRunID,
		State: spelled[commonv1.RunState](r.State),
		//nolint:gosec // small counts
		Phase: r.Phase, Step: int32(r.Step), Epoch: r.Epoch, Fence: r.Fence, Owner: r.Owner,
		HeartbeatAt: timestamp(r.HeartbeatAt), ProgressAt: timestamp(r.ProgressAt), NextAt: timestamp(&r.NextAt),
		DeadlineAt: timestamp(r.DeadlineAt), CancelRequestedAt: timestamp(r.CancelAt), CancelBy: r.CancelBy,
		CancelReason: r.CancelReason, StuckReason: r.StuckReason, WhyWaiting: r.WhyWaiting, ErrorCode: r.ErrorCode,
		Error: r.Error, ErrorLayer: spelled[commonv1.OwnerLayer](r.ErrorLayer), CreatedAt: timestamp(&r.CreatedAt),
		FinishedAt: timestamp(r.FinishedAt), CorrelationId: r.CorrelationID, Version: r.Version, StepNames: r.StepNames,
		Requester: r.Requester,
	}
}

// Proto returns the attempt as the timeline shows it.
func (a *Attempt) Proto() *lifecyclev1.StepAttempt {
	return &lifecyclev1.StepAttempt{
		//nolint:gosec // small counts
		RunId: a.RunID, WorkspaceId: a.WorkspaceID, Step: int32(a.Step), Name: a.Name,
		Direction: spelled[commonv1.Direction](a.Dir),
		//nolint:gosec // small counts
		Attempt: int32(a.Attempt), State: spelled[commonv1.AttemptState](a.State), Fence: a.Fence, OpSeq: a.OpSeq,
		StartedAt: timestamp(&a.StartedAt), HeartbeatAt: timestamp(a.HeartbeatAt), ProgressAt: timestamp(a.ProgressAt),
		Progress: a.Progress, FinishedAt: timestamp(a.FinishedAt), ErrorCode: a.ErrorCode, Error: a.Error,
		ErrorLayer: spelled[commonv1.OwnerLayer](a.ErrorLayer), Stalled: a.Stalled, WhyWaiting: a.WhyWaiting,
		Output: outputStruct(a.Output), Version: a.Version, Cause: a.Cause,
		LastOutput: a.LastOutput,
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

// Proto returns the workspace as the API and events show it: its whole row, but only the names of the environment
// variables, whose values are sealed. It fails on a stored spec or endpoint list that this build cannot read.
func (w *Workspace) Proto() (*lifecyclev1.Workspace, error) {
	out := &lifecyclev1.Workspace{
		WorkspaceId: w.ID, TenantId: w.TenantID, Tenant: w.Tenant, Name: w.Name, SpecDigest: w.SpecDigest,
		State: spelled[commonv1.WorkspaceState](w.State), Epoch: w.Epoch, OpSeq: w.OpSeq, RunId: w.RunID,
		LastErrorCode: w.LastErrorCode,
		//nolint:gosec // small counts
		LastError: w.LastError, RegisterFailures: int32(w.RegisterFailures), RetryUsed: int32(w.RetryUsed),
		ResetDone: w.ResetDone, NodeId: w.NodeID, NodeName: w.NodeName, CreatedAt: timestamp(&w.CreatedAt),
		StateAt:   timestamp(&w.StateAt),
		Version:   w.Version,
		CreatedBy: w.CreatedBy,
	}
	if len(w.Spec) > 0 && string(w.Spec) != "{}" {
		out.Spec = &lifecyclev1.WorkspaceSpec{}
		if err := names.UnmarshalInto(w.Spec, out.GetSpec()); err != nil {
			return nil, fmt.Errorf("read spec of workspace %s: %w", w.ID, err)
		}
		secretenv.ShowNames(out.GetSpec())
	}
	var raw []json.RawMessage
	if len(w.Endpoints) > 0 {
		if err := json.Unmarshal(w.Endpoints, &raw); err != nil {
			return nil, fmt.Errorf("read endpoints of workspace %s: %w", w.ID, err)
		}
	}
	for _, one := range raw {
		e := &lifecyclev1.Endpoint{}
		if err := names.UnmarshalInto(one, e); err != nil {
			return nil, fmt.Errorf("read endpoint of workspace %s: %w", w.ID, err)
		}
		out.Endpoints = append(out.Endpoints, e)
	}
	return out, nil
}

// MarshalEndpoints marshals endpoints as the workspace's column stores them.
func MarshalEndpoints(endpoints []*lifecyclev1.Endpoint) (json.RawMessage, error) {
	out := make([]json.RawMessage, 0, len(endpoints))
	for _, e := range endpoints {
		raw, err := marshalRow(e)
		if err != nil {
			return nil, err
		}
		out = append(out, raw)
	}
	return json.Marshal(out)
}

func marshalRow(m proto.Message) (json.RawMessage, error) {
	raw, err := names.MarshalJSON(m)
	if err != nil {
		return nil, fmt.Errorf("marshal %s: %w", m.ProtoReflect().Descriptor().Name(), err)
	}
	return raw, nil
}
