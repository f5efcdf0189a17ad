package detect

import (
	"context"
	"fmt"
	"slices"
	"strings"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/findings/finding"
	"github.com/gpuaas/mesh/services/lifecycle/findings/scan"
	"github.com/gpuaas/mesh/services/lifecycle/gate"
)

const (
	nodeOccupied      = commonv1.FindingKind_FINDING_KIND_NODE_OCCUPIED_WITHOUT_ALLOCATION
	allocationEmpty   = commonv1.FindingKind_FINDING_KIND_ALLOCATION_WITHOUT_OCCUPANCY
	instanceUnknown   = commonv1.FindingKind_FINDING_KIND_INSTANCE_WITHOUT_ROW
	claimEmpty        = commonv1.FindingKind_FINDING_KIND_CLAIM_WITHOUT_RESOURCE
	resourceUnclaimed = commonv1.FindingKind_FINDING_KIND_RESOURCE_WITHOUT_CLAIM
	manyProvisions    = commonv1.FindingKind_FINDING_KIND_SUCCESSIVE_PROVISIONS
)

// The next action for each kind of finding.
const (
	nextOccupied = "find out whose work it is; end it with the node's own tools or decommission its workspace; " +
		"the cordon ends with the finding"
	nextEmpty = "recreate the workspace, or decommission it; if its tenant works there all the same, " +
		"escalate before doing either"
	nextUnknownInstance = "if this database was restored, follow docs/restore.md first; a recreation of its workspace " +
		"ends it, and where that is not known here `gpuaas instances end PROVIDER_ID --reason TEXT --yes` does, once " +
		"no session works in it"
	NextClaimEmpty  = "recreate or decommission the workspace: both make what is missing again or release the claim"
	NextStorageGone = "find out on the node who removed the directory, before anything else writes there: what the " +
		"workspace kept in it is gone; bring it back from a copy, or " +
		"recreate or decommission the workspace"
	nextUnclaimed  = "find out who made it; drop it once it is not needed, or bring back the claim that should hold it"
	NextLeftBehind = "the sweep of orphans drops the schema and the role of that name once it can; if this stays, end " +
		"the sessions that read it, or drop both by hand"
	nextProvisions = "look at the timelines of these runs for one cause, before the next is started; after three " +
		"failures decommission, and create under a new name"
)

// busy is the condition, over a workspace's id, that work is under way on it: it has a live run, stuck ones included,
// or its allocation is being released.
func busy(workspaceID string) string {
	return `(EXISTS (SELECT 1 FROM lifecycle.saga_run r WHERE r.workspace_id = ` + workspaceID + `
		AND r.state IN ('pending', 'running', 'waiting', 'compensating', 'stuck'))
	OR EXISTS (SELECT 1 FROM lifecycle.allocation b WHERE b.workspace_id = ` + workspaceID + ` AND b.state = 'releasing'))`
}

// Record is a contradiction within this database on one workspace. It is read in one statement, so that it cannot come
// from rows read at different times.
type Record struct {
	What         string `db:"what"`
	SubjectID    string `db:"subject_id"`
	WorkspaceID  string `db:"workspace_id"`
	TenantID     string `db:"tenant_id"`
	NodeID       string `db:"node_id"`
	AllocationID string `db:"allocation_id"`
	Is           string `db:"found"`
}

// devicesOfReleased reads the devices that nodes of a page hold for allocations which were released.
var devicesOfReleased = pg.Define(pg.RoleLifecycle, "detect.devices_of_released", `
	SELECT 'gpu_hold' AS what, h.node_id::text AS subject_id, a.workspace_id::text AS workspace_id,
		a.tenant_id::text AS tenant_id, h.node_id::text AS node_id,
		a.allocation_id::text AS allocation_id, string_agg(h.device_id, ', ' ORDER BY h.device_id) AS found
	FROM lifecycle.gpu_hold h JOIN lifecycle.allocation a ON a.allocation_id = h.allocation_id
	WHERE `+scan.Page("h.node_id")+` AND a.state = 'released'
		GROUP BY h.node_id, a.workspace_id, a.tenant_id, a.allocation_id`)

// contradictions reads pairs of our own rows that contradict each other, on the workspaces of a page without work under
// way.
var contradictions = pg.Define(pg.RoleLifecycle, "detect.contradictions", `
	SELECT 'slot' AS what, s.node_id::text AS subject_id, s.workspace_id::text AS workspace_id,
		coalesce(w.tenant_id::text, '') AS tenant_id,
		s.node_id::text AS node_id, '' AS allocation_id, 'epoch ' || s.epoch AS found
	FROM lifecycle.static_placement s LEFT JOIN lifecycle.workspace w ON w.id = s.workspace_id
	WHERE `+scan.Page("s.workspace_id")+` AND s.ended_at IS NULL AND NOT `+busy("s.workspace_id")+`
		AND NOT EXISTS (SELECT 1 FROM lifecycle.allocation a WHERE a.workspace_id = s.workspace_id AND a.node_id = s.node_id
			AND a.state <> 'released')
	UNION ALL
	SELECT 'box', g.node_id::text, g.workspace_id::text, coalesce(w.tenant_id::text, ''), g.node_id::text, '',
		'epoch ' || g.epoch
	FROM lifecycle.node_gate g LEFT JOIN lifecycle.workspace w ON w.id = g.workspace_id
	WHERE `+scan.Page("g.workspace_id")+` AND g.instance_id IS NOT NULL AND g.workspace_id IS NOT NULL AND g.admitted
		AND NOT g.retired AND `+gate.ConnectedSQL+` AND NOT `+busy("g.workspace_id")+`
		AND NOT EXISTS (SELECT 1 FROM lifecycle.allocation a WHERE a.workspace_id = g.workspace_id AND a.state <> 'released')
	UNION ALL
	SELECT 'no_instance', a.allocation_id::text, a.workspace_id::text, a.tenant_id::text, coalesce(a.node_id::text, ''),
		a.allocation_id::text,
		coalesce((SELECT 'its instance has ended: ' || i.end_reason FROM lifecycle.instance i
			WHERE i.workspace_id = a.workspace_id AND i.epoch = a.epoch), 'it has no instance')
	FROM lifecycle.allocation a
		WHERE `+scan.Page("a.workspace_id")+` AND a.state = 'active' AND NOT `+busy("a.workspace_id")+`
		AND NOT EXISTS (SELECT 1 FROM lifecycle.instance i WHERE i.workspace_id = a.workspace_id AND i.epoch = a.epoch
			AND i.state <> 'ended')
	UNION ALL
	SELECT 'few_devices', a.allocation_id::text, a.workspace_id::text, a.tenant_id::text, coalesce(a.node_id::text, ''),
		a.allocation_id::text,
		'it is of ' || a.gpus || ' GPUs and holds ' || (SELECT count(*) FROM lifecycle.gpu_hold h
			WHERE h.allocation_id = a.allocation_id)
	FROM lifecycle.allocation a
		WHERE `+scan.Page("a.workspace_id")+` AND a.state = 'active' AND NOT `+busy("a.workspace_id")+`
		AND a.gpus > (SELECT count(*) FROM lifecycle.gpu_hold h WHERE h.allocation_id = a.allocation_id)
	UNION ALL
	SELECT 'slot_claim', c.id::text, c.workspace_id::text, c.tenant_id::text, coalesce(c.node_id::text, ''), '',
		c.deterministic_name
	FROM lifecycle.resource_claim c
		WHERE `+scan.Page("c.workspace_id")+` AND c.kind = 'slot' AND c.released_at IS NULL AND c.orphaned_at IS NULL
			AND NOT `+busy("c.workspace_id")+`
		AND NOT EXISTS (SELECT 1 FROM lifecycle.allocation a WHERE a.workspace_id = c.workspace_id AND a.state <> 'released')
	UNION ALL
	SELECT 'handle_claim', c.id::text, c.workspace_id::text, c.tenant_id::text, '', '', c.deterministic_name
	FROM lifecycle.resource_claim c
		WHERE `+scan.Page("c.workspace_id")+` AND c.kind = 'handle' AND c.confirmed_at IS NOT NULL AND c.released_at IS NULL
			AND c.orphaned_at IS NULL
		AND NOT `+busy("c.workspace_id")+` AND NOT EXISTS (SELECT 1 FROM lifecycle.workspace_handle h
			WHERE h.workspace_id = c.workspace_id)
	UNION ALL
	SELECT 'identity_claim', c.id::text, c.workspace_id::text, c.tenant_id::text, coalesce(i.node_id::text, ''), '',
		CASE WHEN g.retired THEN 'recovery has retired it' ELSE 'no node has it' END
	FROM lifecycle.resource_claim c
	LEFT JOIN lifecycle.instance i ON i.workspace_id = c.workspace_id AND i.epoch = c.epoch
	LEFT JOIN lifecycle.node_gate g ON g.node_id = i.node_id
	WHERE `+scan.Page("c.workspace_id")+` AND c.kind = 'identity' AND c.confirmed_at IS NOT NULL AND c.released_at IS NULL
		AND c.orphaned_at IS NULL
		AND (g.node_id IS NULL OR g.retired) AND NOT `+busy("c.workspace_id")+`
	UNION ALL
	SELECT 'unclaimed_slot', a.allocation_id::text, a.workspace_id::text, a.tenant_id::text,
		coalesce(a.node_id::text, ''), a.allocation_id::text, 'epoch ' || a.epoch
	FROM lifecycle.allocation a WHERE `+scan.Page("a.workspace_id")+` AND a.state = 'active'
		AND NOT `+busy("a.workspace_id")+`
		AND NOT EXISTS (SELECT 1 FROM lifecycle.resource_claim c
			WHERE c.workspace_id = a.workspace_id AND c.kind = 'slot' AND c.released_at IS NULL)
	UNION ALL
	SELECT 'unclaimed_handle', h.workspace_id::text, h.workspace_id::text, w.tenant_id::text, '', '', h.handle
	FROM lifecycle.workspace_handle h JOIN lifecycle.workspace w ON w.id = h.workspace_id
		WHERE `+scan.Page("h.workspace_id")+` AND NOT `+busy("h.workspace_id")+`
		AND NOT EXISTS (SELECT 1 FROM lifecycle.resource_claim c
			WHERE c.workspace_id = h.workspace_id AND c.kind = 'handle' AND c.released_at IS NULL)`)

// Records finds the rows of this database that contradict each other.
func (d *Detectors) Records(ctx context.Context) ([]finding.Seen, error) {
	list, err := scan.All[Record](ctx, d.pages, "node", devicesOfReleased)
	if err != nil {
		return nil, fmt.Errorf("compare devices with allocations: %w", err)
	}
	more, err := scan.All[Record](ctx, d.pages, "workspace", contradictions)
	if err != nil {
		return nil, fmt.Errorf("compare records: %w", err)
	}
	list = append(list, more...)
	nodes := map[string][]Record{}
	var out []finding.Seen
	for _, r := range list {
		if seen, ok := r.seen(); ok {
			out = append(out, seen)
		} else {
			nodes[r.NodeID] = append(nodes[r.NodeID], r)
		}
	}
	for node, held := range nodes {
		out = append(out, Occupied(node, held))
	}
	return out, nil
}

// seen returns the record as a finding; false for a record that is combined with others of its node (occupied).
func (r Record) seen() (finding.Seen, bool) {
	out := finding.Seen{
		Severity: finding.P1, SubjectID: r.SubjectID, WorkspaceID: r.WorkspaceID, TenantID: r.TenantID, NodeID: r.NodeID,
		AllocationID: r.AllocationID, Before: map[string]any{}, After: map[string]any{"found": r.Is},
	}
	switch r.What {
	case "no_instance":
		out.Kind, out.SubjectType, out.NextAction, out.Cordon = allocationEmpty, "allocation", nextEmpty, true
		out.Summary = "an allocation is active and nothing stands in it: " + r.Is
	case "few_devices":
		out.Kind, out.SubjectType, out.NextAction, out.Cordon = allocationEmpty, "allocation", nextEmpty, true
		out.Summary = "an allocation does not hold the devices that it is of: " + r.Is
	case "slot_claim", "handle_claim":
		out.Kind, out.SubjectType, out.NextAction = claimEmpty, "claim", NextClaimEmpty
		out.Summary = fmt.Sprintf("the %s that is claimed as %q is gone", strings.TrimSuffix(r.What, "_claim"), r.Is)
	case "identity_claim":
		out.Kind, out.SubjectType, out.NextAction = claimEmpty, "claim", NextClaimEmpty
		out.Summary = "the identity that is claimed for the workspace's instance is gone: " + r.Is
	case "unclaimed_slot":
		out.Kind, out.SubjectType, out.NextAction = resourceUnclaimed, "allocation", nextUnclaimed
		out.Summary = "an allocation is active and no claim holds its slot"
	case "unclaimed_handle":
		out.Kind, out.SubjectType, out.NextAction = resourceUnclaimed, "workspace", nextUnclaimed
		out.Summary = fmt.Sprintf("the handle %q stands and no claim holds it", r.Is)
	default:
		return finding.Seen{}, false
	}
	return out, true
}

// Occupied returns one finding for all resources on one node without a live allocation.
func Occupied(node string, held []Record) finding.Seen {
	words := map[string]string{
		"gpu_hold": "devices are held for an allocation that was released",
		"slot":     "a slot is taken by a workspace that has no allocation here",
		"box":      "the instance of a workspace that has no allocation is connected",
		"workload": "its agent reports running workloads of a workspace that has no allocation here",
	}
	slices.SortFunc(held, func(a, b Record) int {
		return slices.Compare([]string{a.WorkspaceID, a.What, a.Is}, []string{b.WorkspaceID, b.What, b.Is})
	})
	var why []string
	list := make([]any, 0, len(held))
	for _, r := range held {
		if !slices.Contains(why, words[r.What]) {
			why = append(why, words[r.What])
		}
		list = append(list, map[string]any{
			"what": r.What, "workspace_id": r.WorkspaceID, "allocation_id": r.AllocationID,
			"found": r.Is,
		})
	}
	return finding.Seen{
		Kind: nodeOccupied, Severity: finding.P1, SubjectType: "node", SubjectID: node, NodeID: node,
		WorkspaceID: held[0].WorkspaceID, TenantID: held[0].TenantID, AllocationID: held[0].AllocationID,
		Summary: "a node is occupied without a live allocation: " + strings.Join(why, "; "), NextAction: nextOccupied,
		Before: map[string]any{"allocations": "none that is live"}, After: map[string]any{"occupied_by": list}, Cordon: true,
	}
}
