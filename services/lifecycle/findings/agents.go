package findings

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"google.golang.org/protobuf/encoding/protojson"

	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/pg"
)

// report is what an agent last said of one workspace, while that is fresh.
type report struct {
	workspaceID, nodeID string
	at                  time.Time
	workloads           map[string]nodev1.WorkloadPhase
	storage             *nodev1.StorageReport // nil: the agent does not report directories
}

// place is a workspace on a node.
type place struct{ workspaceID, nodeID string }

// placeFacts is what our rows say of it, read after the report.
type placeFacts struct {
	tenantID  string
	busy      bool
	held      bool // an allocation of the workspace there is not released
	released  time.Time
	allocated string
}

// nodeClaim is a claim on a workload or a storage directory of a node.
type nodeClaim struct {
	place

	id, tenantID, kind, name, ref string
	confirmed, gone               bool // gone: given up
	at                            time.Time
}

// lookAtAgents compares what agents report with the allocations and the claims. A report counts if it is fresh and was written down longer after the
// last change of what it is compared with than the grace: an older one may speak of what was.
func (s *Sweeper) lookAtAgents(ctx context.Context) ([]Seen, error) {
	reports, err := s.reports(ctx)
	if err != nil || len(reports) == 0 {
		return nil, err
	}
	var workspaces, nodes []string
	for _, r := range reports {
		workspaces, nodes = append(workspaces, r.workspaceID), append(nodes, r.nodeID)
	}
	facts, err := s.placeFacts(ctx, workspaces, nodes)
	if err != nil {
		return nil, err
	}
	claims, err := s.nodeClaims(ctx, workspaces)
	if err != nil {
		return nil, err
	}
	var out []Seen
	loose := map[string][]record{}
	for _, r := range reports {
		p := place{r.workspaceID, r.nodeID}
		f := facts[p]
		if f.busy {
			continue
		}
		if !f.held {
			for name, phase := range r.workloads {
				if runs(phase) && r.at.After(f.released.Add(s.cfg.Grace)) {
					loose[r.nodeID] = append(loose[r.nodeID], record{what: "workload", workspaceID: r.workspaceID, tenantID: f.tenantID, nodeID: r.nodeID, is: name})
				}
			}
			continue
		}
		out = append(out, s.compareClaims(r, f, claims[p])...)
	}
	for node, held := range loose {
		out = append(out, occupied(node, held))
	}
	return out, nil
}

// compareClaims finds claimed workloads and directories that the agent does not have, and workloads that nothing claims.
func (s *Sweeper) compareClaims(r report, f placeFacts, claims []nodeClaim) []Seen {
	var out []Seen
	claimed := map[string]bool{}
	for _, c := range claims {
		if c.kind == "storage" {
			if seen, ok := s.storageGone(r, f, c); ok {
				out = append(out, seen)
			}
			continue
		}
		claimed[c.name] = true
		phase, told := r.workloads[c.name]
		if c.gone || !c.confirmed || told && phase != nodev1.WorkloadPhase_WORKLOAD_PHASE_ABSENT || !r.at.After(c.at.Add(s.cfg.Grace)) {
			continue
		}
		out = append(out, Seen{
			Kind: claimEmpty, Severity: p1, SubjectType: "claim", SubjectID: c.id, WorkspaceID: r.workspaceID, TenantID: c.tenantID, NodeID: r.nodeID,
			AllocationID: f.allocated, NextAction: nextClaimEmpty, Summary: fmt.Sprintf("the workload that is claimed as %q is not on its node", c.name),
			Before: map[string]any{"workload": c.name}, After: map[string]any{"reported": len(r.workloads), "reported_at": r.at.UTC().Format(time.RFC3339)},
		})
	}
	for name, phase := range r.workloads {
		if claimed[name] || !runs(phase) {
			continue
		}
		out = append(out, Seen{
			Kind: resourceUnclaimed, Severity: p1, SubjectType: "workload", SubjectID: r.nodeID + "/" + r.workspaceID + "/" + name, WorkspaceID: r.workspaceID,
			TenantID: f.tenantID, NodeID: r.nodeID, AllocationID: f.allocated, NextAction: nextUnclaimed,
			Summary: fmt.Sprintf("the workload %q runs on its workspace's node and no claim holds it", name),
			Before:  map[string]any{"claim": "none"}, After: map[string]any{"workload": name, "reported_at": r.at.UTC().Format(time.RFC3339)},
		})
	}
	return out
}

// storageGone returns the finding on a claimed directory that the agent does not have; false if it has it, or does not report directories.
func (s *Sweeper) storageGone(r report, f placeFacts, c nodeClaim) (Seen, bool) {
	if c.gone || !c.confirmed || r.storage == nil || slices.Contains(r.storage.GetNames(), c.name) || !r.at.After(c.at.Add(s.cfg.Grace)) {
		return Seen{}, false
	}
	return Seen{
		Kind: claimEmpty, Severity: p1, SubjectType: "claim", SubjectID: c.id, WorkspaceID: r.workspaceID, TenantID: c.tenantID, NodeID: r.nodeID,
		AllocationID: f.allocated, NextAction: nextStorageGone,
		Summary: fmt.Sprintf("the storage directory that is claimed as %q is not on its node", c.name),
		Before:  map[string]any{"storage": c.name, "directory": c.ref},
		After:   map[string]any{"reported": len(r.storage.GetNames()), "reported_at": r.at.UTC().Format(time.RFC3339)},
	}, true
}

func runs(p nodev1.WorkloadPhase) bool {
	return p == nodev1.WorkloadPhase_WORKLOAD_PHASE_STARTING || p == nodev1.WorkloadPhase_WORKLOAD_PHASE_RUNNING || p == nodev1.WorkloadPhase_WORKLOAD_PHASE_BACKOFF
}

var freshReports = pg.Define(pg.RoleLifecycle, "findings.fresh_reports", `SELECT o.workspace_id::text, o.node_id::text, o.observed_at, o.payload FROM lifecycle.observed_workload o
		WHERE o.observed_at > mesh.clock() - make_interval(secs => $1)`)

func (s *Sweeper) reports(ctx context.Context) ([]report, error) {
	rows, err := pg.Query(ctx, s.deps.DB, freshReports, s.cfg.Fresh.Seconds())
	if err != nil {
		return nil, fmt.Errorf("read agents' reports: %w", err)
	}
	var out []report
	var r report
	var raw json.RawMessage
	_, err = pgx.ForEachRow(rows, []any{&r.workspaceID, &r.nodeID, &r.at, &raw}, func() error {
		o := &nodev1.Observation{}
		if err := (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(raw, o); err != nil {
			return fmt.Errorf("read report on workspace %s: %w", r.workspaceID, err)
		}
		r.workloads, r.storage = map[string]nodev1.WorkloadPhase{}, o.GetStorage()
		for _, w := range o.GetWorkloads() {
			r.workloads[w.GetName()] = w.GetPhase()
		}
		out = append(out, r)
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("read agents' reports: %w", err)
	}
	return out, nil
}

var placesOf = pg.Define(pg.RoleLifecycle, "findings.places_of", `
		SELECT p.workspace_id::text, p.node_id::text, coalesce(w.tenant_id::text, ''), `+busy("p.workspace_id")+`,
			EXISTS (SELECT 1 FROM lifecycle.allocation a WHERE a.workspace_id = p.workspace_id AND a.state <> 'released' AND (a.node_id = p.node_id OR a.node_id IS NULL)),
			coalesce((SELECT max(a.state_at) FROM lifecycle.allocation a WHERE a.workspace_id = p.workspace_id), 'epoch'),
			coalesce((SELECT a.allocation_id::text FROM lifecycle.allocation a WHERE a.workspace_id = p.workspace_id AND a.state <> 'released'), '')
		FROM unnest($1::uuid[], $2::uuid[]) AS p (workspace_id, node_id) LEFT JOIN lifecycle.workspace w ON w.id = p.workspace_id`)

func (s *Sweeper) placeFacts(ctx context.Context, workspaces, nodes []string) (map[place]placeFacts, error) {
	rows, err := pg.Query(ctx, s.deps.DB, placesOf, workspaces, nodes)
	if err != nil {
		return nil, fmt.Errorf("read what should run: %w", err)
	}
	out := map[place]placeFacts{}
	var p place
	var f placeFacts
	_, err = pgx.ForEachRow(rows, []any{&p.workspaceID, &p.nodeID, &f.tenantID, &f.busy, &f.held, &f.released, &f.allocated}, func() error {
		out[p] = f
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("read what should run: %w", err)
	}
	return out, nil
}

var claimsOnNodes = pg.Define(pg.RoleLifecycle, "findings.claims_on_nodes", `
		SELECT c.workspace_id::text, coalesce(c.node_id::text, ''), c.id::text, c.tenant_id::text, c.kind, c.deterministic_name, c.external_ref,
			c.confirmed_at IS NOT NULL, c.orphaned_at IS NOT NULL, coalesce(c.confirmed_at, c.intent_at)
		FROM lifecycle.resource_claim c WHERE c.workspace_id = ANY ($1::uuid[]) AND c.kind IN ('workload', 'storage') AND c.released_at IS NULL`)

func (s *Sweeper) nodeClaims(ctx context.Context, workspaces []string) (map[place][]nodeClaim, error) {
	rows, err := pg.Query(ctx, s.deps.DB, claimsOnNodes,
		workspaces)
	if err != nil {
		return nil, fmt.Errorf("read claims on nodes: %w", err)
	}
	out := map[place][]nodeClaim{}
	var c nodeClaim
	_, err = pgx.ForEachRow(rows, []any{&c.workspaceID, &c.nodeID, &c.id, &c.tenantID, &c.kind, &c.name, &c.ref, &c.confirmed, &c.gone, &c.at}, func() error {
		out[c.place] = append(out[c.place], c)
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("read claims on nodes: %w", err)
	}
	return out, nil
}
