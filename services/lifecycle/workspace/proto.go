package workspace

import (
	"encoding/json"
	"fmt"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/aside"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/secretenv"
)

// Proto returns the workspace as the API and events show it: its whole row, but only the names of the environment
// variables, whose values are sealed. It fails on a stored spec or endpoint list that this build cannot read.
func (w *Row) Proto() (*lifecyclev1.Workspace, error) {
	out := &lifecyclev1.Workspace{
		WorkspaceId: w.ID, TenantId: w.TenantID, Tenant: w.Tenant, Name: w.Name, SpecDigest: w.SpecDigest,
		State: w.WorkspaceState(), Epoch: w.Epoch, OpSeq: w.OpSeq, RunId: w.RunID,
		LastErrorCode: w.LastErrorCode,
		// small counts
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

// timestamp returns a column's time for the API, and nil for none.
func timestamp(t *time.Time) *timestamppb.Timestamp {
	if t == nil || t.IsZero() {
		return nil
	}
	return timestamppb.New(*t)
}

// WorkspaceState returns the state; unspecified for one that this build does not know, which is reported by package
// aside.
func (w *Row) WorkspaceState() commonv1.WorkspaceState {
	return aside.Value[commonv1.WorkspaceState]("workspace", w.ID, w.State)
}
