package reap

import (
	"context"
	"fmt"

	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/allocation"
	"github.com/gpuaas/mesh/services/lifecycle/placement"
)

// Owner is what lifecycle's database has about one (workspace, epoch) of a driver's list.
type Owner struct {
	Known    bool  `db:"-"`        // the workspace is in the database
	Epoch    int64 `db:"epoch"`    // the last epoch that was drawn for it
	RunOpen  bool  `db:"run_open"` // a run owns the workspace, stuck ones included
	RunEpoch int64 `db:"run_epoch"`
	// Instance is the state of the instance's row, empty if there is none; InstanceID is the instance that it names.
	Instance   string `db:"instance_state"`
	InstanceID string `db:"instance_id"`
	Claimed    bool   `db:"claimed"`  // a claim on this instance is neither released nor given up
	GivenUp    bool   `db:"given_up"` // a claim on this instance was given up and is not known to be gone
}

// another reports whether the row of the instance's epoch names another instance than b.
func (o Owner) another(b placement.Instance) bool {
	return o.InstanceID != "" && b.InstanceID != "" && o.InstanceID != b.InstanceID
}

// Verdict on an instance of a driver's list.
type Verdict string

// The verdicts. Only an Orphan is ended.
const (
	Owned   Verdict = "owned"   // by an open run, a live instance, or a claim that a retry adopts
	Gone    Verdict = "gone"    // it has ended, and that is recorded
	Orphan  Verdict = "orphan"  // by the database, no workspace owns it
	Unknown Verdict = "unknown" // the database does not account for it, which is no evidence that it is an orphan
)

// Belongs returns the verdict on an instance, and the reason if it is an orphan or unknown. An orphan needs positive
// evidence: a database that has the workspace and has drawn that epoch, no open run in it, and a row or a claim by
// which the instance ended or was given up. A workspace or an epoch that the database does not have means that the
// database went back, or that the driver serves another database: ending the instance could then end a tenant's work.
// So does another instance at the present epoch; once a later epoch is drawn, that instance is superseded like any
// other.
func Belongs(b placement.Instance, o Owner) (Verdict, string) {
	standing := o.Instance != "" && o.Instance != "ended" // by the row of the instance
	switch {
	case !o.Known:
		return Unknown, "no such workspace is known here"
	case b.Epoch > o.Epoch:
		return Unknown, fmt.Sprintf("epoch %d was never drawn here, the last one is %d", b.Epoch, o.Epoch)
	case b.Epoch == o.Epoch && o.another(b):
		return Unknown, fmt.Sprintf("epoch %d was drawn here for instance %s", b.Epoch, o.InstanceID)
	case o.RunOpen && o.RunEpoch == b.Epoch, o.Claimed:
		// Between its launch and the record of it, an instance is owned by its run; a live claim is adopted by a retry, or
		// undone.
		return Owned, ""
	case !b.EndedAt.IsZero() && !o.GivenUp && (o.Instance == "ended" || (o.Instance == "" && b.Epoch < o.Epoch)):
		// The row of an earlier epoch's instance ends with its retention; drivers list the instance for longer.
		return Gone, ""
	case o.GivenUp:
		return Orphan, "its release was given up and nothing owns it since"
	case standing:
		return Owned, ""
	case b.Epoch < o.Epoch:
		return Orphan, fmt.Sprintf("epoch %d of its workspace has been superseded by %d", b.Epoch, o.Epoch)
	default:
		return Orphan, "its instance has ended and no operation is open"
	}
}

var ownersOfInstances = pg.Define(pg.RoleLifecycle, "reap.owners_of_instances", `
		SELECT b.n::int AS n, w.epoch, r.id IS NOT NULL AS run_open, coalesce(r.epoch, 0) AS run_epoch,
			coalesce(i.state, '') AS instance_state, coalesce(i.instance_id::text, '') AS instance_id,
			EXISTS (SELECT 1 FROM lifecycle.resource_claim c
				WHERE c.workspace_id = b.workspace_id AND c.kind = $3 AND c.epoch = b.epoch
				AND c.released_at IS NULL AND c.orphaned_at IS NULL) AS claimed,
			EXISTS (SELECT 1 FROM lifecycle.resource_claim c
				WHERE c.workspace_id = b.workspace_id AND c.kind = $3 AND c.epoch = b.epoch
				AND c.released_at IS NULL AND c.orphaned_at IS NOT NULL) AS given_up
		FROM unnest($1::uuid[], $2::bigint[]) WITH ORDINALITY AS b (workspace_id, epoch, n)
		JOIN lifecycle.workspace w ON w.id = b.workspace_id
		LEFT JOIN lifecycle.saga_run r ON r.workspace_id = b.workspace_id
			AND r.state IN ('pending', 'running', 'waiting', 'compensating', 'stuck')
		LEFT JOIN lifecycle.instance i ON i.workspace_id = b.workspace_id AND i.epoch = b.epoch`)

// OwnersOf returns the Owner of each instance, in their order, as of one moment.
func OwnersOf(ctx context.Context, q pg.Querier, instances []placement.Instance) ([]Owner, error) {
	out := make([]Owner, len(instances))
	var workspaces []string
	var epochs []int64
	var at []int
	for i, b := range instances {
		if !ids.Valid(b.WorkspaceID) {
			continue // not of a workspace of this database
		}
		workspaces, epochs, at = append(workspaces, b.WorkspaceID), append(epochs, b.Epoch), append(at, i)
	}
	if len(workspaces) == 0 {
		return out, nil
	}
	owners, err := pg.All[struct {
		N int `db:"n"` // which of the instances that were asked for, from 1 on
		Owner
	}](ctx, q, ownersOfInstances, workspaces, epochs, allocation.KindInstance)
	if err != nil {
		return nil, fmt.Errorf("read owners of instances: %w", err)
	}
	for _, o := range owners {
		o.Known = true
		out[at[o.N-1]] = o.Owner
	}
	return out, nil
}
