package provision

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/services/lifecycle/allocation"
	"github.com/gpuaas/mesh/services/lifecycle/claims"
	"github.com/gpuaas/mesh/services/lifecycle/gate"
	"github.com/gpuaas/mesh/services/lifecycle/placement"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
	"github.com/gpuaas/mesh/services/lifecycle/spec"
)

// endPrevious makes room for the epoch of this run: the workloads of earlier epochs are stopped through their agent
// where it can be reached, the driver confirms that their instances have ended, their identities are retired, and their
// allocation is released. On a shared machine the storage stays, and passes to this epoch with the slot. Work that is
// done is not checked again: the live claims of earlier epochs are exactly the work that is left.
//
// Scenario: double-provision-race. It is called again after each wait.
func (s *Steps) endPrevious(ctx context.Context, env *saga.Env) (saga.Outcome, error) {
	in, spec, err := spec.Read(env.Input)
	if err != nil {
		return saga.Outcome{}, err
	}
	driver, ok := s.deps.Drivers[spec.GetPlacement()]
	if !ok {
		return saga.Outcome{}, saga.Fail(commonv1.OwnerLayer_OWNER_LAYER_DEPLOY, commonv1.Reason_REASON_PLACEMENT_UNAVAILABLE,
			fmt.Sprintf("placement %s is not available here", names.Of(spec.GetPlacement())), nil)
	}
	own := placement.HasOwnInstance(spec.GetPlacement())
	f, err := s.formerOf(ctx, env, own, in.Attestation != nil)
	if err != nil {
		return saga.Outcome{}, err
	}
	why, err := s.stopPrevious(ctx, env, f)
	if err != nil {
		return saga.Outcome{}, err
	}
	if why != "" {
		return waitTask(why), nil
	}
	// First the epochs that count as ended on a person's attestation: a driver confirms no end while claims of an earlier
	// epoch stand in its way.
	for _, epoch := range slices.Sorted(maps.Keys(f.lost)) {
		if err := s.fence(ctx, env, driver, epoch, in.Attestation); err != nil {
			return saga.Outcome{}, err
		}
	}
	if err := s.takeOverStorage(ctx, env, f); err != nil {
		return saga.Outcome{}, err
	}
	instances, err := previousClaims(ctx, env, allocation.KindInstance)
	if err != nil {
		return saga.Outcome{}, err
	}
	for _, c := range instances {
		if err = s.endInstance(ctx, env, c); err != nil && own && in.Attestation != nil && env.Attempt > 1 &&
			ctx.Err() == nil && !saga.Interrupted(err) {
			err = s.fence(ctx, env, driver, c.Epoch, in.Attestation)
		}
		if err != nil {
			return saga.Outcome{}, err
		}
	}
	if err := s.retirePrevious(ctx, env); err != nil {
		return untilRecovery(ctx, err)
	}
	slots, err := previousClaims(ctx, env, allocation.KindSlot)
	if err != nil {
		return saga.Outcome{}, err
	}
	return saga.Done(
		nil, func(ctx context.Context, tx pgx.Tx) error { return allocation.Pass(ctx, tx, env, slots, f.kept != "") },
	), nil
}

// previousClaims returns the live claims of earlier epochs.
func previousClaims(ctx context.Context, env *saga.Env, kinds ...string) ([]claims.Claim, error) {
	held, err := claimsOf(ctx, env, kinds...)
	return slices.DeleteFunc(held, func(c claims.Claim) bool { return c.Epoch >= env.Epoch }), err
}

// former is what earlier epochs have left, judged once for the whole call, since machines come and go meanwhile. Each
// instance is judged by its own machine.
type former struct {
	own  bool
	held []claims.Claim  // workloads, storage and instances
	away map[string]bool // machines that do not answer
	lost map[int64]bool  // epochs on such machines that a person has given an attestation for
	kept string          // the shared machine whose slot and storage pass to this epoch; empty if there is none
}

func (s *Steps) formerOf(ctx context.Context, env *saga.Env, own, proven bool) (former, error) {
	f := former{own: own, away: map[string]bool{}, lost: map[int64]bool{}}
	var err error
	if f.held, err = previousClaims(ctx, env, allocation.KindWorkload, allocation.KindStorage,
		allocation.KindInstance); err != nil || own {
		return f, err
	}
	for _, c := range f.held {
		if _, seen := f.away[c.NodeID]; c.NodeID != "" && !seen {
			f.away[c.NodeID] = !gate.Reachable(ctx, s.deps.DB, c.NodeID)
		}
		if f.away[c.NodeID] && proven {
			f.lost[c.Epoch] = true
		}
	}
	a, held, err := allocation.Live(ctx, s.deps.DB, env.WorkspaceID)
	if err != nil {
		return f, err
	}
	if !held || a.Epoch >= env.Epoch || f.lost[a.Epoch] || proven && a.NodeID != "" &&
		!gate.Reachable(ctx, s.deps.DB, a.NodeID) {
		return f, nil
	}
	// An earlier attempt may have given up the claims on the machine: then there is nothing to keep.
	left, err := allocation.CountOrphans(ctx, s.deps.DB, env.WorkspaceID, a.Epoch)
	if err == nil && left == 0 {
		f.kept = a.NodeID
	}
	return f, err
}

// stopPrevious has agents remove the workloads of earlier epochs, except those that end with their instance, and on a
// shared machine that this epoch does not take over the storage as well. It returns what the step has to wait for,
// empty if nothing; a machine that does not answer does not delay the removal on the others.
func (s *Steps) stopPrevious(ctx context.Context, env *saga.Env, f former) (string, error) {
	away, waiting := 0, 0
	for _, kind := range []string{allocation.KindWorkload, allocation.KindStorage} {
		for _, c := range f.held {
			if c.Kind != kind || c.NodeID == "" || f.lost[c.Epoch] || kind == allocation.KindStorage &&
				(f.own || c.NodeID == f.kept) {
				continue
			}
			if f.own && !gate.Reachable(ctx, s.deps.DB, c.NodeID) || f.away[c.NodeID] {
				continue // it ends with its instance, or is counted in away below
			}
			spec := taskSpec{
				suffix: "stop-" + c.Name, kind: commonv1.TaskType_TASK_TYPE_WORKLOAD_REMOVE, nodeID: c.NodeID,
				payload: &nodev1.WorkloadRef{Name: c.Name}, within: time.Minute,
			}
			if kind == allocation.KindStorage {
				spec.suffix, spec.kind = "clear-"+c.Name, commonv1.TaskType_TASK_TYPE_STORAGE_RELEASE
				spec.payload = &nodev1.StorageRelease{Name: c.Name}
			}
			_, done, err := s.do(ctx, env, spec)
			switch {
			case err != nil && (!f.own || saga.Interrupted(err)):
				return "", err
			case err != nil, !done && f.own && s.overdue(ctx, env):
				continue
			case !done:
				waiting++
			default:
				if err := env.Release(ctx, c); err != nil {
					return "", fmt.Errorf("release %s: %w", c.Kind, err)
				}
			}
		}
		if waiting > 0 {
			return fmt.Sprintf("waiting for the agent to remove what the former epoch has left: %d of kind %s", waiting, kind),
				nil
		}
	}
	for _, c := range f.held {
		if f.away[c.NodeID] && !f.lost[c.Epoch] {
			away++
		}
	}
	if away > 0 {
		return "a machine that holds the workspace does not answer, and only its agent can confirm that the former epoch " +
			"has ended", nil
	}
	return "", nil
}

// takeOverStorage passes the claim on the directory on the machine f.kept to this epoch: no claim of an earlier epoch
// is left there then.
func (s *Steps) takeOverStorage(ctx context.Context, env *saga.Env, f former) error {
	if f.kept == "" {
		return nil
	}
	held, err := previousClaims(ctx, env, allocation.KindStorage)
	if err != nil {
		return err
	}
	for _, c := range held {
		if c.NodeID != f.kept {
			continue
		}
		spec := claims.Spec{
			Kind: c.Kind, Name: c.Name, Scope: commonv1.ClaimScope_CLAIM_SCOPE_NODE_LOCAL,
			NodeID: c.NodeID,
		}
		if _, _, err := env.Intent(ctx, spec); err != nil {
			return fmt.Errorf("take storage over: %w", err)
		}
	}
	return nil
}

// fence goes on without the driver's confirmation, on a person's attestation: the claims of the epoch whose resources
// may still exist become orphans, which are reaped once the machine or the driver can be reached, the machine takes no
// new workspace until then, and the driver lets the next epoch be launched.
func (s *Steps) fence(ctx context.Context, env *saga.Env, driver placement.Driver, epoch int64,
	w *spec.Attestation,
) error {
	if err := env.Proceed(ctx); err != nil {
		return err
	}
	if err := driver.Fence(ctx, env.WorkspaceID, epoch, w.String()); err != nil {
		return saga.Retry(commonv1.OwnerLayer_OWNER_LAYER_DEPLOY, fault.ReasonOf(err),
			"the placement did not write the fenced proof down", err)
	}
	left, err := previousClaims(ctx, env, allocation.KindWorkload, allocation.KindStorage, allocation.KindInstance)
	if err != nil {
		return err
	}
	left = slices.DeleteFunc(left, func(c claims.Claim) bool { return c.Epoch != epoch })
	err = env.TxAfter(ctx, lockNodes(env), func(ctx context.Context, tx pgx.Tx) error {
		i, ok, err := allocation.InstanceOf(ctx, tx, env.WorkspaceID, epoch)
		if err != nil {
			return err
		}
		own := ok && placement.HasOwnInstance(i.Placement)
		reason := fmt.Sprintf("epoch %d of workspace %s was fenced on proof %s and may have left something here: %s", epoch,
			env.WorkspaceID, w.Proof, w.Reason)
		for _, c := range left {
			// An instance of the workspace's own may still run: the sweep of the driver's list ends it. A machine that existed
			// before the workspace is no such instance.
			if c.Kind == allocation.KindInstance && !own {
				if err := env.ReleaseTx(ctx, tx, c); err != nil {
					return fmt.Errorf("release instance: %w", err)
				}
				continue
			}
			if err := env.OrphanTx(ctx, tx, c, w.By, "fenced on proof "+w.Proof+": "+w.Reason); err != nil {
				return fmt.Errorf("orphan what is left: %w", err)
			}
			if own || c.NodeID == "" {
				continue
			}
			if _, err := gate.CordonUnlessIs(ctx, tx, c.NodeID, reason, allocation.CordonOwner); err != nil {
				return fmt.Errorf("cordon node: %w", err)
			}
		}
		if !ok || i.State == commonv1.InstanceState_INSTANCE_STATE_ENDED {
			return nil
		}
		_, err = allocation.SetInstance(ctx, tx, i, commonv1.InstanceState_INSTANCE_STATE_ENDED, "", "",
			"fenced: "+w.String())
		return err
	})
	if err != nil {
		return fmt.Errorf("fence former epoch: %w", err)
	}
	s.deps.Committed()
	return nil
}

// retirePrevious ends the identities of earlier instances: a process that still runs with one of them is refused from
// now on.
func (s *Steps) retirePrevious(ctx context.Context, env *saga.Env) error {
	identities, err := previousClaims(ctx, env, allocation.KindIdentity)
	if err != nil {
		return err
	}
	for _, c := range identities {
		if err := env.Proceed(ctx); err != nil {
			return err
		}
		_, err := s.deps.Identities.RetireInstance(ctx, &recoveryv1.RetireInstanceRequest{
			InstanceId: c.Name, WorkspaceId: env.WorkspaceID, Epoch: c.Epoch,
			Reason: fmt.Sprintf("epoch %d takes its place", env.Epoch),
		})
		if err != nil && !fault.Has(err, commonv1.Reason_REASON_NOT_FOUND) {
			return saga.Retry(commonv1.OwnerLayer_OWNER_LAYER_CERT, fault.ReasonOf(err),
				"recovery did not retire the former instance's identity", err)
		}
		if err := env.Release(ctx, c); err != nil {
			return fmt.Errorf("release identity: %w", err)
		}
	}
	return nil
}

// observePrevious observes whether anything of an earlier epoch is left to end.
func (s *Steps) observePrevious(ctx context.Context, env *saga.Env) (saga.Observation, error) {
	left, err := previousClaims(ctx, env, allocation.KindSlot, allocation.KindIdentity, allocation.KindInstance,
		allocation.KindStorage, allocation.KindWorkload)
	if err != nil {
		return saga.Observation{}, err
	}
	a, held, err := allocation.Live(ctx, s.deps.DB, env.WorkspaceID)
	if err != nil {
		return saga.Observation{}, err
	}
	if len(left) > 0 || held && a.Epoch < env.Epoch {
		return saga.Observation{Presence: saga.Partial, Why: "the former epoch is not ended in full"}, nil
	}
	return saga.Observation{Presence: saga.Present}, nil
}
