// Package obs owns what an operator sees of a process: its log lines, metrics, health and the ops listener that serves
// them.
//
// It takes ids from the context, where callers put them (With), and never invents one. Logs are for machines first:
// attributes with the shared key names, static messages. It never puts an id on a metric label, never prints a secret
// that it can recognise, and never decides anything.
//
// Guarantees: every line logged with a context carries the correlation of that context; every metric of a Registry
// starts with gpuaas_; pprof is served on a unix socket only.
package obs

import (
	"context"
	"log/slog"
)

// The keys of the shared ids in logs, JSON and SQL.
const (
	KeyCorrelationID  = "correlation_id"
	KeyTenantID       = "tenant_id"
	KeyWorkspaceID    = "workspace_id"
	KeyWorkflowID     = "workflow_id"
	KeyAllocationID   = "allocation_id"
	KeyTaskID         = "task_id"
	KeyNodeID         = "node_id"
	KeyNodeInstanceID = "node_instance_id"

	KeyService = "service"
	KeyError   = "error"
	KeyReason  = "reason"
)

// Correlation holds the ids by which related lines and events are found: one id of each kind, empty where it does not
// apply.
type Correlation struct {
	CorrelationID  string
	TenantID       string
	WorkspaceID    string
	WorkflowID     string
	AllocationID   string
	TaskID         string
	NodeID         string
	NodeInstanceID string
}

type correlationKey struct{}

// With returns a context that carries c; ids that are empty in c keep the value the context had.
func With(ctx context.Context, c Correlation) context.Context {
	return context.WithValue(ctx, correlationKey{}, From(ctx).merge(c))
}

// From returns the correlation of the context, empty if it has none.
func From(ctx context.Context) Correlation {
	c, _ := ctx.Value(correlationKey{}).(Correlation)
	return c
}

// merge works on copies: c and over are values.
func (c Correlation) merge(over Correlation) Correlation {
	to, from := fields(&c), fields(&over)
	for i := range to {
		if *from[i].value != "" {
			*to[i].value = *from[i].value
		}
	}
	return c
}

type field struct {
	key   string
	value *string
}

func fields(c *Correlation) [8]field {
	return [8]field{
		{KeyCorrelationID, &c.CorrelationID},
		{KeyTenantID, &c.TenantID},
		{KeyWorkspaceID, &c.WorkspaceID},
		{KeyWorkflowID, &c.WorkflowID},
		{KeyAllocationID, &c.AllocationID},
		{KeyTaskID, &c.TaskID},
		{KeyNodeID, &c.NodeID},
		{KeyNodeInstanceID, &c.NodeInstanceID},
	}
}

// Attrs returns the ids that are set, for a log line without a context.
func (c Correlation) Attrs() []slog.Attr {
	out := make([]slog.Attr, 0, 8)
	for _, f := range fields(&c) {
		if *f.value != "" {
			out = append(out, slog.String(f.key, *f.value))
		}
	}
	return out
}
