package workspace

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/services/lifecycle/gate"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
)

const (
	// cordonOwner is who cordons a machine on which a release has left something, and takes that cordon away again once it is reaped.
	cordonOwner = "release"

	// ReleaseDeadline is how long a release may take before the hold counts as release_failed, where the configuration says nothing.
	ReleaseDeadline = 2 * time.Minute

	// ForceGrace is how long each undo of a forced release is tried.
	ForceGrace = 10 * time.Second
)

// failRelease says of a hold that its release has failed: it keeps occupancy `cleanup`, is visible with its reason and never placeable, and its machine
// takes no new workspace. Scenario: release-failed-stuck.
func failRelease(ctx context.Context, tx pgx.Tx, a allocation, why string) error {
	if a.State == commonv1.AllocationState_ALLOCATION_STATE_RELEASE_FAILED {
		return nil
	}
	moved, err := moveAllocation(ctx, tx, a, allocationMove{
		state: commonv1.AllocationState_ALLOCATION_STATE_RELEASE_FAILED, occupancy: "cleanup", why: why,
	})
	if err != nil || moved.NodeID == "" {
		return err
	}
	if _, err := gate.CordonUnlessIs(ctx, tx, moved.NodeID, "the release of allocation "+moved.ID+" has failed: "+why, cordonOwner); err != nil {
		return fmt.Errorf("cordon node: %w", err)
	}
	return nil
}

// onStuck is what it means for a hold that its run is stuck: what the run was giving back, nobody gives back any more.
func (s *Steps) onStuck(ctx context.Context, tx pgx.Tx, workspaceID string, why *saga.StepError) error {
	a, ok, err := liveAllocation(ctx, tx, workspaceID)
	if err != nil || !ok || a.State != commonv1.AllocationState_ALLOCATION_STATE_RELEASING {
		return err
	}
	return failRelease(ctx, tx, a, why.Public)
}

// releaseLate says whether the release of the workspace's hold is past its deadline.
func (s *Steps) releaseLate(ctx context.Context, env *saga.Env) bool {
	var late bool
	err := s.deps.DB.QueryRow(ctx, `
		SELECT EXISTS (SELECT 1 FROM lifecycle.allocation WHERE workspace_id = $1 AND state = 'releasing' AND release_deadline_at <= mesh.clock())`,
		env.WorkspaceID).Scan(&late)
	return err == nil && late
}

// lateFault ends an undo that waits for an agent that does not come.
func lateFault(what string) error {
	return saga.GiveUp(commonv1.OwnerLayer_OWNER_LAYER_RUNTIME, commonv1.Reason_REASON_DEADLINE_OF_STEP_EXCEEDED,
		"the agent on the workspace's machine did not "+what+" before the release's deadline", nil)
}

// forced tries a step of a forced release for a short while; then what could not be cleaned becomes orphan claims, and the release goes on.
func (s *Steps) forced(do saga.StepFunc, last bool, kinds ...string) saga.StepFunc {
	return func(ctx context.Context, env *saga.Env) (saga.Outcome, error) {
		if env.Kind != kForceRelease {
			return do(ctx, env)
		}
		late, err := s.forceLate(ctx, env)
		if err != nil {
			return saga.Outcome{}, err
		}
		why := fmt.Sprintf("it was not done within %s", orDefault(s.deps.ForceGrace, ForceGrace))
		if !late {
			out, err := do(ctx, env)
			if err == nil || ctx.Err() != nil || errors.Is(err, saga.ErrFenced) {
				return out, err
			}
			why = fault.From(err).Public
			if e, ok := errors.AsType[*saga.StepError](err); ok {
				why = e.Public
			}
		}
		return s.concede(ctx, env, last, why, kinds)
	}
}

func (s *Steps) forceLate(ctx context.Context, env *saga.Env) (bool, error) {
	var late bool
	err := s.deps.DB.QueryRow(ctx, `
		SELECT coalesce(min(started_at) <= mesh.clock() - make_interval(secs => $3), false) FROM lifecycle.saga_step WHERE run_id = $1 AND step = $2`,
		env.RunID, env.Step, orDefault(s.deps.ForceGrace, ForceGrace).Seconds()).Scan(&late)
	if err != nil {
		return false, fmt.Errorf("read age of step: %w", err)
	}
	return late, nil
}

// concede leaves what a step could not clean behind as orphan claims, on the word of a person. The last step also gives the hold back: the driver lets
// a later epoch be launched, and the machine stays cordoned until the orphans are reaped.
func (s *Steps) concede(ctx context.Context, env *saga.Env, last bool, why string, kinds []string) (saga.Outcome, error) {
	in, _, err := readInput(env.Input)
	if err != nil {
		return saga.Outcome{}, err
	}
	if in.Word == nil {
		return saga.Outcome{}, saga.Fail(commonv1.OwnerLayer_OWNER_LAYER_WORKFLOW, commonv1.Reason_REASON_INTERNAL, "a forced release carries no person's word", nil)
	}
	claims, err := claimsOf(ctx, env, kinds...)
	if err != nil {
		return saga.Outcome{}, err
	}
	a, held, err := liveAllocation(ctx, s.deps.DB, env.WorkspaceID)
	if err != nil {
		return saga.Outcome{}, err
	}
	if last && held {
		if driver, ok := s.deps.Drivers[a.Placement]; ok {
			if err := driver.Fence(ctx, env.WorkspaceID, a.Epoch, in.Word.String()); err != nil {
				return saga.Outcome{}, saga.Retry(commonv1.OwnerLayer_OWNER_LAYER_DEPLOY, fault.ReasonOf(err), "the placement did not write the fenced proof down", err)
			}
		}
	}
	return saga.Done(nil, func(ctx context.Context, tx pgx.Tx) error {
		for _, c := range claims {
			// A slot is a row of ours, and the box of a machine that was there before is no box: both are given back with the hold.
			if c.Kind == kindSlot || c.Kind == kindInstance && held && !ownBox(a.Placement) {
				if err := env.ReleaseTx(ctx, tx, c); err != nil {
					return fmt.Errorf("release %s: %w", c.Kind, err)
				}
				continue
			}
			if err := env.OrphanTx(ctx, tx, c, in.Word.By, fmt.Sprintf("force-released on proof %s (%s); %s", in.Word.Proof, in.Word.Reason, why)); err != nil {
				return fmt.Errorf("orphan %s: %w", c.Kind, err)
			}
		}
		if !last {
			return nil
		}
		return s.freeHold(ctx, tx, env, in.Word)
	}), nil
}

// freeHold ends a forced release: the hold is released, and its machine cordoned for as long as something was left there.
func (s *Steps) freeHold(ctx context.Context, tx pgx.Tx, env *saga.Env, w *word) error {
	a, held, err := liveAllocation(ctx, tx, env.WorkspaceID)
	if err != nil || !held {
		return err
	}
	i, ok, err := instanceOf(ctx, tx, env.WorkspaceID, a.Epoch)
	if err != nil {
		return err
	}
	if ok && i.State != commonv1.InstanceState_INSTANCE_STATE_ENDED {
		if _, err := setInstance(ctx, tx, i, commonv1.InstanceState_INSTANCE_STATE_ENDED, "", "", "force-released: "+w.String()); err != nil {
			return err
		}
	}
	if _, err := setAllocation(ctx, tx, a, commonv1.AllocationState_ALLOCATION_STATE_RELEASED, "none"); err != nil {
		return err
	}
	left, err := orphansOf(ctx, tx, env.WorkspaceID, a.Epoch)
	if err != nil || a.NodeID == "" {
		return err
	}
	if left == 0 {
		return uncordonClean(ctx, tx, a.NodeID)
	}
	reason := fmt.Sprintf("allocation %s was force-released by %s and has left %d orphans here", a.ID, w.String(), left)
	if _, err := gate.CordonUnlessIs(ctx, tx, a.NodeID, reason, cordonOwner); err != nil {
		return fmt.Errorf("cordon node: %w", err)
	}
	return nil
}

// uncordonClean takes our cordon from a machine on which nothing is left of a release.
func uncordonClean(ctx context.Context, tx pgx.Tx, nodeID string) error {
	var left bool
	err := tx.QueryRow(ctx, `
		SELECT EXISTS (SELECT 1 FROM lifecycle.resource_claim c WHERE c.node_id = $1 AND c.kind = ANY ($2) AND c.orphaned_at IS NOT NULL AND c.released_at IS NULL)
			OR EXISTS (SELECT 1 FROM lifecycle.allocation a WHERE a.node_id = $1 AND a.state = 'release_failed')`, nodeID, occupying()).Scan(&left)
	if err != nil {
		return fmt.Errorf("look for what is left: %w", err)
	}
	if left {
		return nil
	}
	if err := gate.EndCordonOf(ctx, tx, nodeID, cordonOwner, "", ""); err != nil {
		return fmt.Errorf("uncordon node: %w", err)
	}
	return nil
}
