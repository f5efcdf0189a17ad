package detect

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"google.golang.org/protobuf/encoding/protojson"

	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/findings/finding"
	"github.com/gpuaas/mesh/services/lifecycle/findings/scan"
)

// report is an agent's last report on one workspace, while it is fresh.
type report struct {
	place

	at        time.Time
	workloads map[string]nodev1.WorkloadPhase
	storage   *nodev1.StorageReport // nil: the agent does not report directories
}

// after returns what a finding tells of the report: how many of a kind it has, and whether it has nothing at all.
func (r *report) after(reported int) map[string]any {
	return map[string]any{
		"reported": reported, "reported_at": r.at.UTC().Format(time.RFC3339), finding.Emptied: r.empty(),
	}
}

// empty reports whether the agent has nothing of the workspace, neither workloads nor directories. Of an agent that
// does not report directories that is not known.
func (r *report) empty() bool {
	if r.storage == nil || len(r.storage.GetNames()) > 0 {
		return false
	}
	for _, phase := range r.workloads {
		if phase != nodev1.WorkloadPhase_WORKLOAD_PHASE_ABSENT {
			return false
		}
	}
	return true
}

// place is a workspace on a node.
type place struct {
	WorkspaceID string `db:"workspace_id"`
	NodeID      string `db:"node_id"`
}

// placeFacts has what our rows contain about a place, read after the report.
type placeFacts struct {
	place

	TenantID  string    `db:"tenant_id"`
	Busy      bool      `db:"busy"`
	Allocated bool      `db:"allocated"` // an allocation of the workspace there is not released
	Released  time.Time `db:"released"`
	// AllocationID is the id of the workspace's allocation that is not released.
	AllocationID string `db:"allocation_id"`
}

// nodeClaim is a claim on a workload or a storage directory of a node.
type nodeClaim struct {
	place

	ID        string    `db:"id"`
	TenantID  string    `db:"tenant_id"`
	Kind      string    `db:"kind"`
	Name      string    `db:"name"`
	Ref       string    `db:"external_ref"`
	Confirmed bool      `db:"confirmed"`
	Gone      bool      `db:"gone"` // given up
	At        time.Time `db:"at"`
}

// Agents compares what agents report with the allocations and the claims. A report counts if it is fresh and was
// made more than the grace after the last change of the row that it is compared with: an older one may describe the
// state before. A workload that no claim covers has no such row, and counts by any fresh report. Work under way does
// not look like it: a run writes the claim before its task, and a workspace with a live run is skipped. Without a run
// only the reaper of machines (package reap) releases the claim of a workload, once the agent's result says that the
// workload is removed or while a later claim covers it; a report from before the removal may still be read after it,
// but not in a second scan while the agent is connected, since it reports a change at once.
func (d *Detectors) Agents(ctx context.Context) ([]finding.Seen, error) {
	var out []finding.Seen
	loose := map[string][]Record{}
	err := d.pages.Each(ctx, "workspace", func(ctx context.Context, after, upTo string) error {
		seen, err := d.compareReports(ctx, after, upTo, loose)
		out = append(out, seen...)
		return err
	})
	if err != nil {
		return nil, err
	}
	for node, held := range loose {
		out = append(out, Occupied(node, held))
	}
	return out, nil
}

// compareReports compares what agents report of the workspaces of a page. Workloads of workspaces without an allocation
// are added to loose, by node.
func (d *Detectors) compareReports(ctx context.Context, after, upTo string, loose map[string][]Record) ([]finding.Seen,
	error,
) {
	reports, err := d.reports(ctx, after, upTo)
	if err != nil || len(reports) == 0 {
		return nil, err
	}
	var workspaces, nodes []string
	for _, r := range reports {
		workspaces, nodes = append(workspaces, r.WorkspaceID), append(nodes, r.NodeID)
	}
	facts, err := d.placeFacts(ctx, workspaces, nodes)
	if err != nil {
		return nil, err
	}
	claims, err := d.nodeClaims(ctx, workspaces)
	if err != nil {
		return nil, err
	}
	var out []finding.Seen
	for _, r := range reports {
		p := r.place
		f := facts[p]
		if f.Busy {
			continue
		}
		if !f.Allocated {
			for name, phase := range r.workloads {
				if runs(phase) && r.at.After(f.Released.Add(d.cfg.Grace)) {
					loose[r.NodeID] = append(loose[r.NodeID],
						Record{What: "workload", WorkspaceID: r.WorkspaceID, TenantID: f.TenantID, NodeID: r.NodeID, Is: name})
				}
			}
			continue
		}
		out = append(out, d.compareClaims(r, f, claims[p])...)
	}
	return out, nil
}

// compareClaims finds claimed workloads and directories that the agent does not have, and workloads that nothing
// claims.
func (d *Detectors) compareClaims(r report, f placeFacts, claims []nodeClaim) []finding.Seen {
	var out []finding.Seen
	claimed := map[string]bool{}
	for _, c := range claims {
		if c.Kind == "storage" {
			if seen, ok := d.storageGone(r, f, c); ok {
				out = append(out, seen)
			}
			continue
		}
		claimed[c.Name] = true
		phase, reported := r.workloads[c.Name]
		if c.Gone || !c.Confirmed || reported && phase != nodev1.WorkloadPhase_WORKLOAD_PHASE_ABSENT ||
			!r.at.After(c.At.Add(d.cfg.Grace)) {
			continue
		}
		out = append(out, finding.Seen{
			Kind: claimEmpty, Severity: finding.P1, SubjectType: "claim", SubjectID: c.ID, WorkspaceID: r.WorkspaceID,
			TenantID: c.TenantID, NodeID: r.NodeID, AllocationID: f.AllocationID, NextAction: NextClaimEmpty,
			Summary: fmt.Sprintf("the workload that is claimed as %q is not on its node", c.Name),
			Before:  map[string]any{"workload": c.Name},
			After:   r.after(len(r.workloads)),
		})
	}
	for name, phase := range r.workloads {
		if claimed[name] || !runs(phase) {
			continue
		}
		out = append(out, finding.Seen{
			Kind: resourceUnclaimed, Severity: finding.P1, SubjectType: "workload",
			SubjectID: r.NodeID + "/" + r.WorkspaceID + "/" + name, WorkspaceID: r.WorkspaceID, TenantID: f.TenantID,
			NodeID: r.NodeID, AllocationID: f.AllocationID, NextAction: nextUnclaimed,
			Summary: fmt.Sprintf("the workload %q runs on its workspace's node and no claim holds it", name),
			Before:  map[string]any{"claim": "none"},
			After:   map[string]any{"workload": name, "reported_at": r.at.UTC().Format(time.RFC3339)},
		})
	}
	return out
}

// storageGone returns the finding on a claimed directory that the agent does not have; false if it has it, or does not
// report directories.
func (d *Detectors) storageGone(r report, f placeFacts, c nodeClaim) (finding.Seen, bool) {
	if c.Gone || !c.Confirmed || r.storage == nil || slices.Contains(r.storage.GetNames(), c.Name) ||
		!r.at.After(c.At.Add(d.cfg.Grace)) {
		return finding.Seen{}, false
	}
	return finding.Seen{
		Kind: claimEmpty, Severity: finding.P1, SubjectType: "claim", SubjectID: c.ID, WorkspaceID: r.WorkspaceID,
		TenantID: c.TenantID, NodeID: r.NodeID, AllocationID: f.AllocationID, NextAction: NextStorageGone,
		Summary: fmt.Sprintf("the storage directory that is claimed as %q is not on its node", c.Name),
		Before:  map[string]any{"storage": c.Name, "directory": c.Ref},
		After:   r.after(len(r.storage.GetNames())),
	}, true
}

func runs(p nodev1.WorkloadPhase) bool {
	return p == nodev1.WorkloadPhase_WORKLOAD_PHASE_STARTING || p == nodev1.WorkloadPhase_WORKLOAD_PHASE_RUNNING ||
		p == nodev1.WorkloadPhase_WORKLOAD_PHASE_BACKOFF
}

// storedReport is a report as it is read.
type storedReport struct {
	place

	At      time.Time       `db:"observed_at"`
	Payload json.RawMessage `db:"payload"`
}

// vouched is how long before its replica's beat an open session confirms an unchanged report: nodeapi reports content
// as stale that a connected agent has not repeated for 150 s.
const vouched = "150 seconds"

// freshReports reads the reports that still hold. A report is stored when it differs from the one before. It is fresh
// while it is young, and as long as the session of its node is open at a live replica: a change is reported at once,
// and content that is not repeated is reported as stale. A session that became ready less than 150 s before the beat
// confirms no older report.
var freshReports = pg.Define(pg.RoleLifecycle, "detect.fresh_reports", `
	SELECT o.workspace_id::text AS workspace_id, o.node_id::text AS node_id, o.payload,
		GREATEST(o.observed_at,
			CASE WHEN g.session_ready_at < r.beat_at - interval
			'`+vouched+`' THEN r.beat_at - interval '`+vouched+`' END) AS observed_at
	FROM lifecycle.observed_workload o
	LEFT JOIN lifecycle.node_gate g ON g.node_id = o.node_id AND g.session_open AND NOT g.retired
	LEFT JOIN mesh.replica r ON r.replica_id = g.replica_id AND r.service = 'nodeapi'
		AND r.beat_at > mesh.clock() - make_interval(secs => $3)
	WHERE `+scan.Page("o.workspace_id")+` AND (o.observed_at > mesh.clock() - make_interval(secs => $3)
		OR r.replica_id IS NOT NULL)`)

// reports reads the fresh reports on the workspaces of a page.
func (d *Detectors) reports(ctx context.Context, after, upTo string) ([]report, error) {
	list, err := pg.All[storedReport](ctx, d.db, freshReports, after, upTo, d.cfg.Fresh.Seconds())
	if err != nil {
		return nil, fmt.Errorf("read agents' reports: %w", err)
	}
	out := make([]report, 0, len(list))
	for _, one := range list {
		o := &nodev1.Observation{}
		if err := (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(one.Payload, o); err != nil {
			return nil, fmt.Errorf("read report on workspace %s: %w", one.WorkspaceID, err)
		}
		if o.GetStaleSince() != nil {
			continue // the agent has not repeated it: no evidence of what is now
		}
		r := report{place: one.place, at: one.At, workloads: map[string]nodev1.WorkloadPhase{}, storage: o.GetStorage()}
		for _, w := range o.GetWorkloads() {
			r.workloads[w.GetName()] = w.GetPhase()
		}
		out = append(out, r)
	}
	return out, nil
}

var placesOf = pg.Define(pg.RoleLifecycle, "detect.places_of", `
		SELECT p.workspace_id::text AS workspace_id, p.node_id::text AS node_id, coalesce(w.tenant_id::text, '') AS tenant_id,
			`+busy("p.workspace_id")+` AS busy,
			EXISTS (SELECT 1 FROM lifecycle.allocation a
				WHERE a.workspace_id = p.workspace_id AND a.state <> 'released'
				AND (a.node_id = p.node_id OR a.node_id IS NULL)) AS allocated,
			coalesce((SELECT max(a.state_at) FROM lifecycle.allocation a
				WHERE a.workspace_id = p.workspace_id), 'epoch') AS released,
			coalesce((SELECT a.allocation_id::text FROM lifecycle.allocation a
				WHERE a.workspace_id = p.workspace_id AND a.state <> 'released'), '') AS allocation_id
		FROM unnest($1::uuid[], $2::uuid[]) AS p (workspace_id, node_id)
		LEFT JOIN lifecycle.workspace w ON w.id = p.workspace_id`)

func (d *Detectors) placeFacts(ctx context.Context, workspaces, nodes []string) (map[place]placeFacts, error) {
	list, err := pg.All[placeFacts](ctx, d.db, placesOf, workspaces, nodes)
	if err != nil {
		return nil, fmt.Errorf("read what should run: %w", err)
	}
	out := make(map[place]placeFacts, len(list))
	for _, f := range list {
		out[f.place] = f
	}
	return out, nil
}

var claimsOnNodes = pg.Define(pg.RoleLifecycle, "detect.claims_on_nodes", `
		SELECT c.workspace_id::text AS workspace_id, coalesce(c.node_id::text, '') AS node_id, c.id::text AS id,
			c.tenant_id::text AS tenant_id, c.kind, c.deterministic_name AS name, c.external_ref,
			c.confirmed_at IS NOT NULL AS confirmed, c.orphaned_at IS NOT NULL AS gone,
				coalesce(c.confirmed_at, c.intent_at) AS at
		FROM lifecycle.resource_claim c WHERE c.workspace_id = ANY ($1::uuid[]) AND c.kind IN ('workload', 'storage')
			AND c.released_at IS NULL`)

func (d *Detectors) nodeClaims(ctx context.Context, workspaces []string) (map[place][]nodeClaim, error) {
	list, err := pg.All[nodeClaim](ctx, d.db, claimsOnNodes, workspaces)
	if err != nil {
		return nil, fmt.Errorf("read claims on nodes: %w", err)
	}
	out := map[place][]nodeClaim{}
	for _, c := range list {
		out[c.place] = append(out[c.place], c)
	}
	return out, nil
}
