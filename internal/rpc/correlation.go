package rpc

import (
	"context"
	"net/http"

	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/obs"
)

// Headers that carry the ids by which related log lines and events are found.
const (
	HeaderCorrelationID  = "Gpuaas-Correlation-Id"
	headerTenantID       = "Gpuaas-Tenant-Id"
	headerWorkspaceID    = "Gpuaas-Workspace-Id"
	headerWorkflowID     = "Gpuaas-Workflow-Id"
	headerAllocationID   = "Gpuaas-Allocation-Id"
	headerTaskID         = "Gpuaas-Task-Id"
	headerNodeID         = "Gpuaas-Node-Id"
	headerNodeInstanceID = "Gpuaas-Node-Instance-Id"
)

type headerField struct {
	name  string
	value *string
}

func correlationFields(c *obs.Correlation) []headerField {
	return []headerField{
		{HeaderCorrelationID, &c.CorrelationID},
		{headerTenantID, &c.TenantID},
		{headerWorkspaceID, &c.WorkspaceID},
		{headerWorkflowID, &c.WorkflowID},
		{headerAllocationID, &c.AllocationID},
		{headerTaskID, &c.TaskID},
		{headerNodeID, &c.NodeID},
		{headerNodeInstanceID, &c.NodeInstanceID},
	}
}

// WriteCorrelation puts the context's ids into the headers of a call. A call without a correlation id starts one.
func WriteCorrelation(ctx context.Context, header http.Header) {
	c := obs.From(ctx)
	if c.CorrelationID == "" {
		c.CorrelationID = ids.New()
	}
	for _, field := range correlationFields(&c) {
		if *field.value != "" {
			header.Set(field.name, *field.value)
		}
	}
}

// ReadCorrelation puts the ids of a request into its context: all of them from a service, the correlation id alone from
// any other caller, since the others would let a stranger write into the log lines of objects that are not its own.
func ReadCorrelation(ctx context.Context, header http.Header, trusted bool) context.Context {
	var c obs.Correlation
	for i, field := range correlationFields(&c) {
		if i > 0 && !trusted {
			break
		}
		if value := header.Get(field.name); safeID(value) {
			*field.value = value
		}
	}
	if c.CorrelationID == "" {
		c.CorrelationID = ids.New()
	}
	return obs.With(ctx, c)
}

func safeID(s string) bool {
	if s == "" || len(s) > 128 {
		return false
	}
	for _, c := range []byte(s) {
		if (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && (c < '0' || c > '9') && c != '-' && c != '_' && c != '.' &&
			c != ':' {
			return false
		}
	}
	return true
}
