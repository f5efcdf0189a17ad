package project

import (
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/names"
)

// KindFinding is a finding of lifecycle's sweeps.
const KindFinding = "finding.changed"

func findingRow(r events.Record) ([]row, error) {
	m, body, err := decode(r, &lifecyclev1.Finding{})
	if err != nil {
		return nil, err
	}
	return one(r, "finding", []any{
		key(m.GetFindingId()), r.AggregateVersion, ref(m.GetWorkspaceId()), ref(m.GetTenantId()), names.Of(m.GetSeverity()),
		m.GetResolvedAt() == nil, body,
	})
}
