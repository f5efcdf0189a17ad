package finding

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/audit"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/gate"
)

// resolveFindings takes from the suspicions of the sources how often and when they have seen the findings last: a row
// is not written by each scan.
var resolveFindings = pg.Define(pg.RoleLifecycle, "finding.resolve_findings", `
		UPDATE lifecycle.finding f SET resolved_at = mesh.clock(), version = f.version + 1,
			count = greatest(f.count, x.looks), last_seen_at = greatest(f.last_seen_at, x.seen_at)
		FROM (SELECT o.finding_id, s.looks, s.seen_at FROM lifecycle.finding o
			LEFT JOIN lifecycle.suspicion s ON s.kind = o.kind AND s.subject_type = o.subject_type
				AND s.subject_id = o.subject_id AND s.source = o.source
			WHERE o.finding_id = ANY ($1::uuid[])) AS x
		WHERE f.finding_id = x.finding_id AND f.resolved_at IS NULL RETURNING `+Columns)

// Resolve closes findings that their detector no longer sees, and ends their cordons unless another finding needs them.
// The suspicions of the detector still stand. It returns the findings as in their events, and the position token of the
// last event.
func Resolve(ctx context.Context, tx pgx.Tx, findingIDs ...string) ([]*lifecyclev1.Finding, string, error) {
	over, err := All(ctx, tx, resolveFindings, findingIDs)
	if err != nil {
		return nil, "", fmt.Errorf("resolve findings: %w", err)
	}
	if len(over) == 0 {
		return nil, "", nil
	}
	slices.SortFunc(over, func(a, b Row) int { return strings.Compare(a.ID, b.ID) })
	var nodes []string
	for _, r := range over {
		if r.Cordoned && r.NodeID != "" {
			nodes = append(nodes, r.NodeID)
		}
	}
	if err := gate.LockForCordons(ctx, tx, nodes...); err != nil {
		return nil, "", err
	}
	var evs []events.Event
	var out []*lifecyclev1.Finding
	for _, r := range over {
		if r.Cordoned && r.NodeID != "" {
			if err := gate.EndCordonOf(ctx, tx, r.NodeID, CordonBy(r.ID)); err != nil {
				return nil, "", err
			}
		}
		if evs, err = appendEvents(evs, r, audit.Event(ctx, decided("finding.resolve", r))); err != nil {
			return nil, "", err
		}
		f, _ := evs[len(evs)-1].Payload.(*lifecyclev1.Finding)
		out = append(out, f)
	}
	pos, err := events.Append(ctx, tx, evs...)
	if err != nil {
		return nil, "", fmt.Errorf("report findings: %w", err)
	}
	return out, pos, nil
}
