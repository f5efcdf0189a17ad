package detect

import (
	"context"
	"fmt"
	"maps"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/findings/finding"
	"github.com/gpuaas/mesh/services/lifecycle/findings/scan"
	"github.com/gpuaas/mesh/services/lifecycle/placement"
)

// instanceKey identifies an instance.
type instanceKey struct {
	workspaceID string
	epoch       int64
}

func (k instanceKey) String() string { return fmt.Sprintf("%s:%d", k.workspaceID, k.epoch) }

// belief is a row according to which an instance exists.
type belief struct {
	What        string `db:"what"`
	ID          string `db:"id"`
	WorkspaceID string `db:"workspace_id"`
	TenantID    string `db:"tenant_id"`
	NodeID      string `db:"node_id"`
	Name        string `db:"name"`
	Epoch       int64  `db:"epoch"`
	Version     int64  `db:"version"`
}

func (b belief) instance() instanceKey { return instanceKey{b.WorkspaceID, b.Epoch} }

var standingByRows = pg.Define(pg.RoleLifecycle, "detect.standing_by_rows", `
		SELECT 'allocation' AS what, a.allocation_id::text AS id, a.workspace_id::text AS workspace_id,
			a.tenant_id::text AS tenant_id, coalesce(a.node_id::text, '') AS node_id, '' AS name, a.epoch, a.version
		FROM lifecycle.allocation a
			WHERE `+scan.Page("a.workspace_id")+` AND a.placement = $3 AND a.state = 'active' AND NOT `+busy("a.workspace_id")+`
		UNION ALL
		SELECT 'claim', c.id::text, c.workspace_id::text, c.tenant_id::text, coalesce(c.node_id::text, ''),
			c.deterministic_name, c.epoch, c.version
		FROM lifecycle.resource_claim c
		JOIN lifecycle.instance i ON i.workspace_id = c.workspace_id AND i.epoch = c.epoch AND i.placement = $3
		WHERE `+scan.Page("c.workspace_id")+` AND c.kind = 'instance' AND c.confirmed_at IS NOT NULL AND c.released_at IS NULL
			AND c.orphaned_at IS NULL AND NOT `+busy("c.workspace_id"))

// believed reads the rows according to which instances exist at a provider, of workspaces without work under way.
func (d *Detectors) believed(ctx context.Context, kind commonv1.PlacementDriver) (map[belief]bool, error) {
	list, err := scan.All[belief](ctx, d.pages, "workspace", standingByRows, names.Of(kind))
	if err != nil {
		return nil, fmt.Errorf("read what should stand: %w", err)
	}
	out := make(map[belief]bool, len(list))
	for _, b := range list {
		out[b] = true
	}
	return out, nil
}

// Instances compares a driver's own list with our rows. The rows that name an instance are read before the list, and
// again after it if one is missing there: an instance that ends meanwhile is then missing in the second reading, or its
// row has changed.
// The list is read before the rows of its instances: those were committed before the launch.
func (d *Detectors) Instances(ctx context.Context, kind commonv1.PlacementDriver,
	driver placement.Driver) ([]finding.Seen,
	error,
) {
	before, err := d.believed(ctx, kind)
	if err != nil {
		return nil, err
	}
	list, err := driver.Standing(ctx)
	if err != nil {
		return nil, fmt.Errorf("list instances: %w", err)
	}
	standing := map[instanceKey]placement.Instance{}
	for _, b := range list {
		if b.EndedAt.IsZero() {
			standing[instanceKey{b.WorkspaceID, b.Epoch}] = b
		}
	}
	out, err := d.unknownInstances(ctx, kind, standing)
	if err != nil {
		return nil, err
	}
	strays, err := d.strays(ctx, kind, list)
	if err != nil {
		return nil, err
	}
	out = append(out, strays...)
	maps.DeleteFunc(before, func(b belief, _ bool) bool {
		_, there := standing[b.instance()]
		return there
	})
	if len(before) == 0 {
		return out, nil
	}
	after, err := d.believed(ctx, kind)
	if err != nil {
		return nil, err
	}
	var missing []belief
	for b := range before {
		if after[b] {
			missing = append(missing, b)
		}
	}
	if len(missing) == 0 {
		return out, nil
	}
	// The ended instances are needed only for the summaries of missing ones.
	if list, err = driver.List(ctx); err != nil {
		return nil, fmt.Errorf("list instances: %w", err)
	}
	ended := map[instanceKey]placement.Instance{}
	for _, b := range list {
		if !b.EndedAt.IsZero() {
			ended[instanceKey{b.WorkspaceID, b.Epoch}] = b
		}
	}
	for _, b := range missing {
		out = append(out, missingInstance(kind, b, ended))
	}
	return out, nil
}

func missingInstance(kind commonv1.PlacementDriver, b belief, ended map[instanceKey]placement.Instance) finding.Seen {
	found := "the provider has never heard of it"
	if e, ok := ended[b.instance()]; ok {
		found = "the provider says that it ended at " + e.EndedAt.UTC().Format("2006-01-02T15:04:05Z")
	}
	out := finding.Seen{
		Kind: allocationEmpty, Severity: finding.P1, SubjectType: b.What, SubjectID: b.ID, WorkspaceID: b.WorkspaceID,
		TenantID: b.TenantID, NodeID: b.NodeID, AllocationID: b.ID, NextAction: nextEmpty,
		Summary: "an allocation is active and its instance is not there: " + found, Cordon: true,
		Before: map[string]any{"box": b.instance().String(), "placement": names.Of(kind)},
		After:  map[string]any{"found": found},
	}
	if b.What == "claim" {
		out.Kind, out.AllocationID, out.NextAction, out.Cordon = claimEmpty, "", NextClaimEmpty, false
		out.Summary = fmt.Sprintf("the instance that is claimed as %q is gone: %s", b.Name, found)
	}
	return out
}

// instanceFacts has what our rows contain about an instance that exists.
type instanceFacts struct {
	WorkspaceID   string `db:"workspace_id"` // empty if it is not known here
	InstanceEpoch int64  `db:"instance_epoch"`
	Epoch         int64  `db:"epoch"`
	TenantID      string `db:"tenant_id"`
	Name          string `db:"name"`
	BusyHere      bool   `db:"busy_here"`
	Instance      string `db:"instance"`
	NodeID        string `db:"node_id"`
	Claimed       bool   `db:"claimed"`
}

var rowsOfInstances = pg.Define(pg.RoleLifecycle, "detect.rows_of_instances", `
		SELECT b.workspace_id::text AS workspace_id, b.epoch AS instance_epoch, w.epoch, w.tenant_id::text AS tenant_id,
			w.name, EXISTS (SELECT 1 FROM lifecycle.saga_run r WHERE r.workspace_id = w.id AND r.epoch = b.epoch
				AND r.state IN ('pending', 'running', 'waiting', 'compensating', 'stuck')) AS busy_here,
			coalesce(i.state, '') AS instance, coalesce(i.node_id::text, '') AS node_id,
			EXISTS (SELECT 1 FROM lifecycle.resource_claim c
				WHERE c.workspace_id = w.id AND c.kind = 'instance' AND c.epoch = b.epoch AND c.released_at IS NULL)
				AS claimed
		FROM unnest($1::uuid[], $2::bigint[]) AS b (workspace_id, epoch) JOIN lifecycle.workspace w ON w.id = b.workspace_id
		LEFT JOIN lifecycle.instance i ON i.workspace_id = w.id AND i.epoch = b.epoch`)

// unknownInstances finds instances that exist at the provider and that no row names as existing.
func (d *Detectors) unknownInstances(ctx context.Context, kind commonv1.PlacementDriver,
	standing map[instanceKey]placement.Instance,
) ([]finding.Seen, error) {
	var workspaces []string
	var epochs []int64
	for k := range standing {
		if ids.Valid(k.workspaceID) {
			workspaces, epochs = append(workspaces, k.workspaceID), append(epochs, k.epoch)
		}
	}
	facts := make(map[instanceKey]instanceFacts, len(workspaces))
	for from := 0; from < len(workspaces); from += d.pages.Size {
		upTo := min(from+d.pages.Size, len(workspaces))
		list, err := pg.All[instanceFacts](ctx, d.db, rowsOfInstances, workspaces[from:upTo], epochs[from:upTo])
		if err != nil {
			return nil, fmt.Errorf("read rows of instances: %w", err)
		}
		for _, f := range list {
			facts[instanceKey{f.WorkspaceID, f.InstanceEpoch}] = f
		}
	}
	var out []finding.Seen
	for k, b := range standing {
		if x, ok := unknownInstance(kind, b, facts[k]); ok {
			out = append(out, x)
		}
	}
	return out, nil
}

// unknownInstance compares one existing instance with its rows, and returns false if they agree. Between an instance's
// launch and its record the run of its epoch is live, and the instance is skipped. SweepTwoInstances finds two
// instances of one workspace.
func unknownInstance(kind commonv1.PlacementDriver, b placement.Instance, f instanceFacts) (finding.Seen, bool) {
	k := instanceKey{b.WorkspaceID, b.Epoch}
	out := finding.Seen{
		Kind: instanceUnknown, Severity: finding.P1, SubjectType: "instance", SubjectID: k.String(), TenantID: f.TenantID,
		NodeID: f.NodeID, NextAction: nextUnknownInstance,
		After: map[string]any{
			"provider_id": b.ProviderID, "instance_id": b.InstanceID, "placement": names.Of(kind),
			"started_at": b.StartedAt.UTC().Format("2006-01-02T15:04:05Z"),
		},
	}
	if f.WorkspaceID != "" {
		out.WorkspaceID = b.WorkspaceID
		out.Before = map[string]any{"workspace": f.Name, "epoch": f.Epoch, "instance": f.Instance}
	}
	switch {
	case f.BusyHere:
		return finding.Seen{}, false
	case f.WorkspaceID == "":
		out.Summary = "the provider runs an instance of a workspace that is not known here"
	case f.Instance == "":
		out.Summary = fmt.Sprintf("the provider runs an instance of epoch %d of %q, and no row names it", b.Epoch, f.Name)
	case f.Instance == "ended":
		out.Summary = fmt.Sprintf("the provider runs the instance of epoch %d of %q, whose row says that it has ended",
			b.Epoch, f.Name)
	case !f.Claimed:
		out.Kind, out.NextAction = resourceUnclaimed, nextUnclaimed
		out.Summary = fmt.Sprintf("the instance of epoch %d of %q stands and no claim holds it", b.Epoch, f.Name)
	default:
		return finding.Seen{}, false
	}
	return out, true
}
