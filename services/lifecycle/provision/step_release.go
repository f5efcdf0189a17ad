package provision

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/allocation"
	"github.com/gpuaas/mesh/services/lifecycle/claims"
	"github.com/gpuaas/mesh/services/lifecycle/gate"
	"github.com/gpuaas/mesh/services/lifecycle/placement"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
)

// release undoes allocate from the claims: the directory, the instance, its identity, the slot. Releasing a resource
// that does not exist succeeds.
func (s *Steps) release(ctx context.Context, env *saga.Env) (saga.Outcome, error) {
	if err := s.withdraw(ctx, env); err != nil {
		return saga.Outcome{}, err
	}
	a, held, err := allocation.Live(ctx, s.deps.DB, env.WorkspaceID)
	if err != nil {
		return saga.Outcome{}, err
	}
	if waiting, err := s.releaseStorage(ctx, env, held && placement.HasOwnInstance(a.Placement)); err != nil || waiting {
		return waitTask("waiting for the agent to remove the workspace's directory"), err
	}
	if err := s.endInstances(ctx, env); err != nil {
		return saga.Outcome{}, err
	}
	slots, err := claimsOf(ctx, env, allocation.KindSlot)
	if err != nil {
		return saga.Outcome{}, err
	}
	return saga.Done(nil, func(ctx context.Context, tx pgx.Tx) error {
		for _, c := range slots {
			if err := env.ReleaseTx(ctx, tx, c); err != nil {
				return fmt.Errorf("release slot: %w", err)
			}
		}
		return allocation.Free(ctx, tx, env.WorkspaceID)
	}).After(lockNodes(env)), nil
}

// releaseStorage has the agent remove the directory. On an instance that is ended afterwards anyway, an agent that
// cannot act does not delay the release: the directory goes with the instance. It returns true while the task is under
// way.
func (s *Steps) releaseStorage(ctx context.Context, env *saga.Env, own bool) (bool, error) {
	held, err := claimsOf(ctx, env, allocation.KindStorage)
	if err != nil || len(held) == 0 {
		return false, err
	}
	for _, c := range held {
		if own && (c.NodeID == "" || !gate.Reachable(ctx, s.deps.DB, c.NodeID)) {
			continue // released with its instance
		}
		_, done, err := s.do(ctx, env, taskSpec{
			suffix: "storage-release", kind: commonv1.TaskType_TASK_TYPE_STORAGE_RELEASE, nodeID: c.NodeID,
			payload: &nodev1.StorageRelease{Name: c.Name}, within: time.Minute,
		})
		if err != nil && (!own || saga.Interrupted(err)) {
			return false, err
		}
		if err != nil {
			continue
		}
		if !done {
			if own && (s.overdue(ctx, env) || allocation.Late(ctx, s.deps.DB, env.WorkspaceID)) {
				continue
			}
			return true, nil
		}
		if err := env.Release(ctx, c); err != nil {
			return false, fmt.Errorf("release storage: %w", err)
		}
	}
	return false, nil
}

// releaseGrace is how long an agent gets to clean up before the instance that it runs on is ended without that.
const releaseGrace = "15 seconds"

var undoIsOverdue = pg.Define(pg.RoleLifecycle, "provision.undo_is_overdue", `
		SELECT coalesce(min(created_at) < mesh.clock() - interval '`+releaseGrace+`', false) FROM lifecycle.task
		WHERE run_id = $1 AND starts_with(idem_key, $2)`)

// overdue reports whether this undo has waited for an agent for longer than the grace.
func (s *Steps) overdue(ctx context.Context, env *saga.Env) bool {
	var late bool
	err := pg.QueryRow(ctx, s.deps.DB, undoIsOverdue, env.RunID, env.IdempotencyKey).Scan(&late)
	return err == nil && late
}

// endInstances ends every instance of the workspace that is claimed, and its identity with it.
func (s *Steps) endInstances(ctx context.Context, env *saga.Env) error {
	held, err := claimsOf(ctx, env, allocation.KindInstance)
	if err != nil {
		return err
	}
	for _, c := range held {
		if err := s.endInstance(ctx, env, c); err != nil {
			return err
		}
	}
	identities, err := claimsOf(ctx, env, allocation.KindIdentity)
	if err != nil {
		return err
	}
	for _, c := range identities {
		if err := env.Proceed(ctx); err != nil {
			return err
		}
		_, err := s.deps.Identities.RetireInstance(ctx, &recoveryv1.RetireInstanceRequest{
			InstanceId: c.Name, WorkspaceId: env.WorkspaceID, Epoch: c.Epoch, Reason: "its instance has ended",
		})
		if err != nil && !fault.Has(err, commonv1.Reason_REASON_NOT_FOUND) {
			return saga.Retry(commonv1.OwnerLayer_OWNER_LAYER_CERT, fault.ReasonOf(err),
				"recovery did not retire the instance's identity", err)
		}
		if err := env.Release(ctx, c); err != nil {
			return fmt.Errorf("release identity: %w", err)
		}
	}
	// No provider has anything of an instance that was prepared and never claimed.
	return env.Tx(ctx, func(ctx context.Context, tx pgx.Tx) error {
		i, ok, err := allocation.InstanceOf(ctx, tx, env.WorkspaceID, env.Epoch)
		if err != nil || !ok || i.State != commonv1.InstanceState_INSTANCE_STATE_PREPARED {
			return err
		}
		_, err = allocation.SetInstance(ctx, tx, i, commonv1.InstanceState_INSTANCE_STATE_ENDED, "", "", "never launched")
		return err
	})
}

func (s *Steps) endInstance(ctx context.Context, env *saga.Env, c claims.Claim) error {
	i, ok, err := allocation.InstanceOf(ctx, s.deps.DB, env.WorkspaceID, c.Epoch)
	if err != nil {
		return err
	}
	if ok {
		driver, have := s.deps.Drivers[i.Placement]
		if !have {
			return saga.Fail(commonv1.OwnerLayer_OWNER_LAYER_DEPLOY, commonv1.Reason_REASON_PLACEMENT_UNAVAILABLE,
				"the placement that launched the instance is not configured", nil)
		}
		if i.State == commonv1.InstanceState_INSTANCE_STATE_LIVE ||
			i.State == commonv1.InstanceState_INSTANCE_STATE_LAUNCHING {
			var ending allocation.Instance
			err := env.Tx(ctx, func(ctx context.Context, tx pgx.Tx) error {
				var err error
				ending, err = allocation.SetInstance(ctx, tx, i, commonv1.InstanceState_INSTANCE_STATE_ENDING, "", "", "")
				return err
			})
			if err != nil {
				return fmt.Errorf("mark ending: %w", err)
			}
			i = ending
		}
		if err := env.Proceed(ctx); err != nil {
			return err
		}
		if err := driver.End(ctx, env.WorkspaceID, c.Epoch); err != nil {
			return saga.Retry(commonv1.OwnerLayer_OWNER_LAYER_DEPLOY, fault.ReasonOf(err), "the instance is not confirmed ended",
				err)
		}
	}
	own := ok && placement.HasOwnInstance(i.Placement)
	rest, err := s.onInstance(ctx, env, c, own)
	if err != nil {
		return err
	}
	err = env.Tx(ctx, func(ctx context.Context, tx pgx.Tx) error {
		// Everything on an instance that is confirmed ended is gone with it.
		for _, r := range rest {
			if err := env.ReleaseTx(ctx, tx, r); err != nil {
				return fmt.Errorf("release what stood on the instance: %w", err)
			}
		}
		if own {
			if err := claims.ReleaseOrphans(ctx, tx, env.WorkspaceID, c.Epoch, allocation.InstanceEnded, allocation.KindStorage,
				allocation.KindWorkload); err != nil {
				return err
			}
		}
		if err := env.ReleaseTx(ctx, tx, c); err != nil {
			return fmt.Errorf("release instance: %w", err)
		}
		if !ok || i.State == commonv1.InstanceState_INSTANCE_STATE_ENDED {
			return nil
		}
		_, err := allocation.SetInstance(ctx, tx, i, commonv1.InstanceState_INSTANCE_STATE_ENDED, "", "", "released")
		return err
	})
	if err != nil {
		return fmt.Errorf("mark ended: %w", err)
	}
	s.deps.Committed()
	return nil
}

// onInstance lists the node-local claims that go with the instance.
func (s *Steps) onInstance(ctx context.Context, env *saga.Env, instance claims.Claim, own bool) ([]claims.Claim,
	error,
) {
	if !own {
		return nil, nil
	}
	held, err := claimsOf(ctx, env, allocation.KindStorage, allocation.KindWorkload)
	if err != nil {
		return nil, err
	}
	var out []claims.Claim
	for _, c := range held {
		if c.Epoch == instance.Epoch {
			out = append(out, c)
		}
	}
	return out, nil
}
