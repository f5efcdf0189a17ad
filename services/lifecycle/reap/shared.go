package reap

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/allocation"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
	"github.com/gpuaas/mesh/services/lifecycle/schema"
)

// SharedReaperDeps are the dependencies of a SharedReaper.
type SharedReaperDeps struct {
	Logger     *slog.Logger
	DB         *pgxpool.Pool
	Workloads  *pgxpool.Pool // the workload database, as its administrator
	Identities allocation.Identities
	Committed  func()
}

// SharedReaper removes what releases have left behind that is on no machine: schemas with their login roles, identities
// of instances, handles. It does so while no operation on the workspace is open, never a resource that a later claim is
// for, and tries each orphan again and again, less and less often.
type SharedReaper struct{ deps SharedReaperDeps }

// NewSharedReaper returns a reaper with the given dependencies.
func NewSharedReaper(deps SharedReaperDeps) *SharedReaper { return &SharedReaper{deps: deps} }

const (
	// ReapAgain is how long the reaper waits before it tries an orphan again. The wait doubles with each try.
	ReapAgain = 30 * time.Second
	// ReapAgainMost is the longest such wait.
	ReapAgainMost = 30 * time.Minute
	// reapWithin bounds one try: a schema that a session reads cannot be dropped, and must not keep the other orphans
	// waiting.
	reapWithin = 10 * time.Second
)

// sharedOrphans reads the orphans that are due, those of each kind in turn, each kind by when it was due: many of one
// kind do not keep the others waiting. An identity whose instance is claimed, and that no later claim is for, cannot be
// released yet and takes no place.
var sharedOrphans = pg.Define(pg.RoleLifecycle, "reap.shared_orphans", `
		SELECT o.claim_id, o.kind, o.name, o.workspace_id, o.tenant_id, o.epoch, '' AS node_id, '' AS key_prefix, '' AS key
		FROM (
			SELECT c.id::text AS claim_id, c.kind, c.deterministic_name AS name, c.workspace_id::text AS workspace_id,
				c.tenant_id::text AS tenant_id, c.epoch,
				row_number() OVER (PARTITION BY c.kind ORDER BY coalesce(t.next_at, c.orphaned_at), c.id) AS place
			FROM lifecycle.resource_claim c LEFT JOIN lifecycle.orphan_try t ON t.claim_id = c.id
			WHERE c.orphaned_at IS NOT NULL AND c.released_at IS NULL AND c.kind = ANY ($1)
				AND (t.next_at IS NULL OR t.next_at <= mesh.clock())
				AND NOT EXISTS (SELECT 1 FROM lifecycle.saga_run r WHERE r.workspace_id = c.workspace_id
					AND r.state IN ('pending', 'running', 'waiting', 'compensating', 'stuck'))
				AND NOT (c.kind = $3 AND EXISTS (SELECT 1 FROM lifecycle.resource_claim b
					WHERE b.workspace_id = c.workspace_id AND b.kind = $4
					AND b.epoch = c.epoch AND b.released_at IS NULL AND b.orphaned_at IS NULL) AND NOT `+replacedSQL+`)
		) o ORDER BY o.place, o.kind LIMIT $2`)

// Sweep tries the orphans that are due, at most ReapBatch of them, and returns how many it released. An orphan that
// could not be removed is an error, and is due again later.
func (r *SharedReaper) Sweep(ctx context.Context) (int, error) {
	list, err := pg.All[leftBehind](ctx, r.deps.DB, sharedOrphans,
		[]string{allocation.KindSchema, allocation.KindIdentity, allocation.KindHandle}, ReapBatch, allocation.KindIdentity,
		allocation.KindInstance)
	if err != nil {
		return 0, fmt.Errorf("list shared orphans: %w", err)
	}
	released := 0
	var errs []error
	down := error(nil)
	// A database that is down concerns all its orphans: none is tried, and all are due as soon as it is back.
	if slices.ContainsFunc(list, func(l leftBehind) bool { return l.Kind == allocation.KindSchema }) {
		if down = r.ping(ctx); down != nil {
			errs = append(errs, down)
		}
	}
	for _, l := range list {
		if l.Kind == allocation.KindSchema && down != nil {
			continue
		}
		gone, err := r.reap(ctx, l)
		if err != nil {
			errs = append(errs, fmt.Errorf("reap %s %s of %s: %w", l.Kind, l.Name, l.WorkspaceID, err))
			continue
		}
		if gone {
			released++
			r.deps.Logger.InfoContext(ctx, "shared orphan is gone", slog.String(obs.KeyWorkspaceID, l.WorkspaceID),
				slog.Int64("epoch", l.Epoch),
				slog.String("kind", l.Kind), slog.String("name", l.Name))
		}
	}
	return released, errors.Join(errs...)
}

// ping returns an error unless the workload database can be reached.
func (r *SharedReaper) ping(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, reapWithin)
	defer cancel()
	if err := r.deps.Workloads.Ping(ctx); err != nil {
		return fmt.Errorf("reach workload database: %w", err)
	}
	return nil
}

func (r *SharedReaper) reap(ctx context.Context, l leftBehind) (bool, error) {
	w, todo, err := r.begin(ctx, l)
	if err != nil {
		// Nothing of begin was committed, so the try is counted here: due at once, it would be the first of each sweep.
		if _, failed := pg.Exec(ctx, r.deps.DB, countTry, l.ClaimID, ReapAgain.Seconds(),
			ReapAgainMost.Seconds()); failed != nil {
			return false, errors.Join(err, fmt.Errorf("count try: %w", failed))
		}
		return false, errors.Join(err, r.note(ctx, l, err))
	}
	if !todo {
		return w.WorkspaceID != "", nil
	}
	bounded, cancel := context.WithTimeout(ctx, reapWithin)
	defer cancel()
	why, err := r.takeAway(bounded, l, w)
	if err != nil {
		return false, errors.Join(err, r.note(ctx, l, err))
	}
	gone := false
	err = pg.InTx(ctx, r.deps.DB, func(ctx context.Context, tx pgx.Tx) error {
		// An operation that took the claim up again meanwhile removes the resource itself.
		if gone, _, err = l.inspect(ctx, tx); err != nil || !gone {
			return err
		}
		return l.forget(ctx, tx, why)
	})
	if err != nil {
		return false, fmt.Errorf("record orphan as gone: %w", err)
	}
	r.deps.Committed()
	return gone, nil
}

var dropHandleRow = pg.Define(pg.RoleLifecycle, "reap.drop_handle_row",
	`DELETE FROM lifecycle.workspace_handle WHERE workspace_id = $1 AND epoch <= $2`)

var instanceClaimed = pg.Define(pg.RoleLifecycle, "reap.instance_claimed",
	`SELECT EXISTS (SELECT 1 FROM lifecycle.resource_claim b WHERE b.workspace_id = $1 AND b.kind = $2 AND b.epoch = $3
				AND b.released_at IS NULL AND b.orphaned_at IS NULL)`)

var numbersOfWorkspace = pg.Define(pg.RoleLifecycle, "reap.numbers_of_workspace",
	`SELECT epoch, op_seq FROM lifecycle.workspace WHERE id = $1`)

var countTry = pg.Define(pg.RoleLifecycle, "reap.count_try", `
			INSERT INTO lifecycle.orphan_try AS t (claim_id, tries, next_at)
				VALUES ($1, 1, mesh.clock() + make_interval(secs => $2))
			ON CONFLICT (claim_id) DO UPDATE
				SET tries = t.tries + 1, next_at = mesh.clock() + make_interval(secs => least($2 * 2 ^ least(t.tries, 20), $3))`)

// begin counts the try and returns the epoch and op_seq to write with: the newest of the workspace, on which no
// operation is open. An operation that begins afterwards writes with higher numbers, and is not touched. An orphan that
// is replaced, or that is a row of this database, is released at once: begin returns a writer with its workspace then,
// and false, since nothing is left to do.
func (r *SharedReaper) begin(ctx context.Context, l leftBehind) (schema.Writer, bool, error) {
	var w schema.Writer
	todo := false
	err := pg.InTx(ctx, r.deps.DB, func(ctx context.Context, tx pgx.Tx) error {
		w, todo = schema.Writer{}, false
		free, replaced, err := l.inspect(ctx, tx)
		if err != nil || !free {
			return err
		}
		if replaced {
			w.WorkspaceID = l.WorkspaceID
			return l.forget(ctx, tx, WhyReplaced)
		}
		switch l.Kind {
		case allocation.KindHandle: // a row of this database: it is deleted while the workspace is locked
			if _, err := pg.Exec(ctx, tx, dropHandleRow, l.WorkspaceID, l.Epoch); err != nil {
				return fmt.Errorf("drop handle: %w", err)
			}
			w.WorkspaceID = l.WorkspaceID
			return l.forget(ctx, tx, "the handle was dropped")
		case allocation.KindIdentity: // not while its instance is claimed
			claimed, err := pg.Value[bool](ctx, tx, instanceClaimed, l.WorkspaceID, allocation.KindInstance, l.Epoch)
			if err != nil || claimed {
				return err
			}
		}
		todo = true
		now, err := pg.One[numbers](ctx, tx, numbersOfWorkspace, l.WorkspaceID)
		if err != nil {
			return fmt.Errorf("read numbers of workspace: %w", err)
		}
		w.WorkspaceID, w.Epoch, w.OpSeq = l.WorkspaceID, now.Epoch, now.OpSeq
		_, err = pg.Exec(ctx, tx, countTry, l.ClaimID, ReapAgain.Seconds(), ReapAgainMost.Seconds())
		if err != nil {
			return fmt.Errorf("count try: %w", err)
		}
		return nil
	})
	if err != nil {
		return schema.Writer{}, false, fmt.Errorf("begin to reap: %w", err)
	}
	r.deps.Committed()
	return w, todo, nil
}

// takeAway removes the resource and returns the evidence that it is gone. Removing a resource that does not exist
// succeeds.
func (r *SharedReaper) takeAway(ctx context.Context, l leftBehind, w schema.Writer) (string, error) {
	switch l.Kind {
	case allocation.KindSchema:
		err := schema.DropFenced(ctx, r.deps.Workloads, l.Name, w)
		if e, ok := errors.AsType[*saga.StepError](err); ok && e.Reason == commonv1.Reason_REASON_TASK_SUPERSEDED {
			// A name goes to another workspace only after it was dropped.
			switch holder, err := schema.HolderOf(ctx, r.deps.Workloads, l.Name); {
			case err != nil:
				return "", err
			case holder != l.WorkspaceID:
				return "its name is workspace " + holder + "'s by now", nil
			}
		}
		return "schema and role were dropped", err
	case allocation.KindIdentity:
		_, err := r.deps.Identities.RetireInstance(ctx, &recoveryv1.RetireInstanceRequest{
			InstanceId: l.Name, WorkspaceId: l.WorkspaceID, Epoch: l.Epoch, Reason: "its release was given up",
		})
		if err != nil && !fault.Has(err, commonv1.Reason_REASON_NOT_FOUND) {
			return "", fmt.Errorf("retire identity: %w", err)
		}
		return "the identity is retired", nil
	default:
		return "", fmt.Errorf("there is no way to take a %s away", l.Kind)
	}
}

var noteTry = pg.Define(pg.RoleLifecycle, "reap.note_try",
	`UPDATE lifecycle.orphan_try SET last_error = $2 WHERE claim_id = $1`)

// note stores why a try has failed, for an operator.
func (r *SharedReaper) note(ctx context.Context, l leftBehind, why error) error {
	_, err := pg.Exec(ctx, r.deps.DB, noteTry, l.ClaimID, why.Error())
	if err != nil {
		return fmt.Errorf("note why an orphan is left: %w", err)
	}
	return nil
}
