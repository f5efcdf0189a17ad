package saga

import (
	"encoding/json"
	"fmt"
	"time"

	"google.golang.org/protobuf/proto"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/secretenv"
)

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

// Workspace is a row of workspace.
type Workspace struct {
	ID               string          `db:"id"`
	TenantID         string          `db:"tenant_id"`
	Tenant           string          `db:"tenant" expr:"COALESCE((SELECT t.name FROM lifecycle.tenant t WHERE t.id = @.tenant_id), '')"` // name
	Name             string          `db:"name"`
	Spec             json.RawMessage `db:"spec"`
	SpecDigest       string          `db:"spec_digest"`
	DesiredState     string          `db:"desired_state"`
	State            string          `db:"state"`
	Epoch            int64           `db:"epoch"`
	OpSeq            int64           `db:"op_seq"`
	RunID            string          `db:"run_id" expr:"COALESCE(@.run_id::text, '')"`
	LastErrorCode    string          `db:"last_error_code"`
	LastError        string          `db:"last_error"`
	RegisterFailures int             `db:"register_failures"`
	RetryUsed        int             `db:"retry_used"`
	RetryWindowStart *time.Time      `db:"retry_window_start"`
	ResetDone        bool            `db:"reset_done"`
	NodeID           string          `db:"node_id" expr:"COALESCE(@.node_id::text, '')"`
	NodeName         string          `db:"node_name"`
	Endpoints        json.RawMessage `db:"endpoints"`
	CreatedBy        string          `db:"created_by"`
	CreatedAt        time.Time       `db:"created_at"`
	StateAt          time.Time       `db:"state_at"`
	Version          int64           `db:"version"`
}
