package allocation

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/audit"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/gate"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
)

// releaseFailed records that an allocation could not be released; any other change of an allocation is part of what its
// run did.
func releaseFailed(ctx context.Context, tx pgx.Tx, a Allocation) error {
	if a.State != commonv1.AllocationState_ALLOCATION_STATE_RELEASE_FAILED {
		return nil
	}
	_, err := audit.Record(ctx, tx, audit.Entry{
		Action: "allocation.release", Outcome: audit.Failed, Reason: a.LastError, SubjectType: "allocation", SubjectID: a.ID,
		TenantID: a.TenantID, WorkspaceID: a.WorkspaceID, AllocationID: a.ID, NodeID: a.NodeID,
		Details: map[string]any{"epoch": a.Epoch, "occupancy": a.Occupancy},
	})
	return err
}

const (
	// CordonOwner is the owner of the cordon of a machine on which a release has left something; the cordon ends once that
	// is reaped.
	CordonOwner = gate.Release

	// ReleaseDeadline is how long a release may take before the allocation counts as release_failed, where the
	// configuration sets nothing.
	ReleaseDeadline = 2 * time.Minute

	// InstanceRelease is the shortest deadline of a release with an instance of its own: the steps wait for its agent
	// twice before the instance is ended without it.
	InstanceRelease = time.Minute

	// ForceGrace is how long a forced release tries each undo.
	ForceGrace = 10 * time.Second
)

// FailRelease sets an allocation to release_failed: it keeps occupancy `cleanup`, is visible with its reason and never
// placeable, and its machine takes no new workspace. Scenario: release-failed-stuck.
func FailRelease(ctx context.Context, tx pgx.Tx, a Allocation, why string) error {
	if a.State == commonv1.AllocationState_ALLOCATION_STATE_RELEASE_FAILED {
		return nil
	}
	moved, err := Transition(ctx, tx, a, Change{
		State: commonv1.AllocationState_ALLOCATION_STATE_RELEASE_FAILED, Occupancy: "cleanup", why: why,
	})
	if err != nil || moved.NodeID == "" {
		return err
	}
	if _, err := gate.CordonUnlessIs(ctx, tx, moved.NodeID, "the release of allocation "+moved.ID+" has failed: "+why,
		CordonOwner); err != nil {
		return fmt.Errorf("cordon node: %w", err)
	}
	return nil
}

// isLate is the condition, over allocation a, that its release is long past its deadline. A run that stands still has
// its deadlines moved on before it goes on.
const isLate = `a.state = 'releasing' AND a.release_deadline_at <= mesh.clock() - interval '30 seconds'
	AND NOT (SELECT mesh.rolled_back())
	AND NOT EXISTS (SELECT 1 FROM lifecycle.run_pause p JOIN lifecycle.saga_run r ON r.id = p.run_id
		WHERE r.workspace_id = a.workspace_id AND p.since IS NOT NULL)`

// lateRelease is an allocation whose release is late, and its node, which may be cordoned.
type lateRelease struct {
	ID     string `db:"allocation_id" expr:"@.allocation_id::text"`
	NodeID string `db:"node_id" expr:"coalesce(@.node_id::text, '')"`
}

var findLate = pg.Define(pg.RoleLifecycle, "allocation.find_late", `
	SELECT `+pg.Columns[lateRelease]("a")+` FROM lifecycle.allocation a WHERE `+isLate+`
	ORDER BY a.allocation_id LIMIT 100`)

var lateReleases = pg.Define(pg.RoleLifecycle, "allocation.late_releases", `
	SELECT `+Columns+` FROM lifecycle.allocation a WHERE a.allocation_id = ANY ($1::uuid[]) AND `+isLate+`
	ORDER BY a.allocation_id FOR UPDATE OF a SKIP LOCKED`)

// FailLate makes allocations release_failed whose releases are long past their deadlines and whose runs have not
// failed: no driver drives such a run, or the call that it hangs on does not heed its context. A run that succeeds
// later releases the allocation then.
func FailLate(ctx context.Context, db pg.Beginner) (int, error) {
	n := 0
	err := pg.InTx(ctx, db, func(ctx context.Context, tx pgx.Tx) error {
		n = 0
		found, err := pg.All[lateRelease](ctx, tx, findLate)
		if err != nil {
			return fmt.Errorf("look for late releases: %w", err)
		}
		if len(found) == 0 {
			return nil
		}
		late, err := lockLate(ctx, tx, found)
		if err != nil {
			return err
		}
		for _, a := range late {
			why := "no operation is open that releases it"
			run, open, err := runs.Live(ctx, tx, a.WorkspaceID)
			if err != nil {
				return err
			}
			if open {
				why = fmt.Sprintf("operation %s is %s at the step %q: %s", run.ID, run.State, run.StepName(), run.WhyWaiting)
			}
			if err := FailRelease(ctx, tx, a, "the release is past its deadline: "+why); err != nil {
				return err
			}
			n++
		}
		return nil
	})
	return n, err
}

var gatesOfLateReleases = pg.Define(pg.RoleLifecycle, "allocation.gates_of_late_releases", `
	SELECT FROM lifecycle.node_gate g WHERE g.node_id = ANY ($1::uuid[]) ORDER BY g.node_id FOR NO KEY UPDATE`)

// lockLate locks the gates of the nodes of late releases, which stops leases there, and then the allocations whose
// releases are still late.
func lockLate(ctx context.Context, tx pgx.Tx, found []lateRelease) ([]Allocation, error) {
	ids, nodes := make([]string, 0, len(found)), make([]string, 0, len(found))
	for _, a := range found {
		ids = append(ids, a.ID)
		if a.NodeID != "" {
			nodes = append(nodes, a.NodeID)
		}
	}
	if err := pg.Queue(ctx, tx, gatesOfLateReleases, nodes); err != nil {
		return nil, fmt.Errorf("lock gates of late releases: %w", err)
	}
	late, err := All(ctx, tx, lateReleases, ids)
	if err != nil {
		return nil, fmt.Errorf("lock late releases: %w", err)
	}
	return late, nil
}

var leftOnMachine = pg.Define(pg.RoleLifecycle, "allocation.left_on_machine", `
		SELECT EXISTS (SELECT 1 FROM lifecycle.resource_claim c
			WHERE c.node_id = $1 AND c.kind = ANY ($2) AND c.orphaned_at IS NOT NULL AND c.released_at IS NULL)
			OR EXISTS (SELECT 1 FROM lifecycle.allocation a WHERE a.node_id = $1 AND a.state = 'release_failed')`)

// UncordonIfClean removes the cordon that a failed release set, that of CordonOwner, from a machine on which nothing is
// left of a release.
func UncordonIfClean(ctx context.Context, tx pgx.Tx, nodeID string) error {
	var left bool
	err := pg.QueryRow(ctx, tx, leftOnMachine, nodeID, occupying()).Scan(&left)
	if err != nil {
		return fmt.Errorf("look for what is left: %w", err)
	}
	if left {
		return nil
	}
	if err := gate.EndCordonOf(ctx, tx, nodeID, CordonOwner); err != nil {
		return fmt.Errorf("uncordon node: %w", err)
	}
	return nil
}
