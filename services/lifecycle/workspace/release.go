package workspace

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/gate"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
)

const (
	// cordonOwner is the owner of the cordon of a machine on which a release has left something; the cordon ends once that
	// is reaped.
	cordonOwner = gate.Release

	// ReleaseDeadline is how long a release may take before the allocation counts as release_failed, where the
	// configuration sets nothing.
	ReleaseDeadline = 2 * time.Minute

	// instanceRelease is the shortest deadline of a release with an instance of its own: the steps wait for its agent
	// twice before the instance is ended without it.
	instanceRelease = time.Minute

	// ForceGrace is how long a forced release tries each undo.
	ForceGrace = 10 * time.Second
)

// failRelease sets an allocation to release_failed: it keeps occupancy `cleanup`, is visible with its reason and never
// placeable, and its machine takes no new workspace. Scenario: release-failed-stuck.
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
	if _, err := gate.CordonUnlessIs(ctx, tx, moved.NodeID, "the release of allocation "+moved.ID+" has failed: "+why,
		cordonOwner); err != nil {
		return fmt.Errorf("cordon node: %w", err)
	}
	return nil
}

// onStuck makes the allocation of a workspace release_failed if it was being released and its run is stuck: no run goes
// on with that release.
func (s *Steps) onStuck(ctx context.Context, tx pgx.Tx, workspaceID string, why *saga.StepError) error {
	a, ok, err := liveAllocation(ctx, tx, workspaceID)
	if err != nil || !ok || a.State != commonv1.AllocationState_ALLOCATION_STATE_RELEASING {
		return err
	}
	return failRelease(ctx, tx, a, why.Public)
}

// timely makes fn part of the release of the workspace's allocation: the first such step begins the release, no such
// step outlasts the release's deadline, whatever it hangs on, and a step that has not ended by then ends the run as
// stuck, which makes the allocation release_failed.
func (s *Steps) timely(fn saga.StepFunc) saga.StepFunc {
	return func(ctx context.Context, env *saga.Env) (saga.Outcome, error) {
		a, held, err := liveAllocation(ctx, s.deps.DB, env.WorkspaceID)
		if err != nil {
			return saga.Outcome{}, err
		}
		if held && a.State != commonv1.AllocationState_ALLOCATION_STATE_RELEASING {
			if _, err := s.beginRelease(ctx, env, a); err != nil {
				return saga.Outcome{}, err
			}
		}
		if !held || env.Kind == kForceRelease { // a forced one has deadlines of its own
			return fn(ctx, env)
		}
		left, err := s.releaseLeft(ctx, env)
		if err != nil {
			return saga.Outcome{}, err
		}
		bounded, cancel := context.WithTimeout(ctx, max(left, lastCheck))
		defer cancel()
		out, err := fn(bounded, env)
		if ctx.Err() != nil || saga.Interrupted(err) || err == nil && !out.Waits() || !s.releaseLate(ctx, env) {
			return out, err
		}
		layer, why := commonv1.OwnerLayer_OWNER_LAYER_RUNTIME, out.Why()
		if err != nil {
			layer, why = layerOf(err), publicOf(err)
		}
		return saga.Outcome{}, saga.GiveUp(layer, commonv1.Reason_REASON_DEADLINE_OF_STEP_EXCEEDED,
			"the release is past its deadline: "+why, err)
	}
}

// layerOf returns the layer that owns an error; unspecified if the error names none, and then the step's own layer
// counts.
func layerOf(err error) commonv1.OwnerLayer {
	if e, ok := errors.AsType[*saga.StepError](err); ok {
		return e.Layer
	}
	return commonv1.OwnerLayer_OWNER_LAYER_UNSPECIFIED
}

// publicOf returns the text of an error that people may see.
func publicOf(err error) string {
	if e, ok := errors.AsType[*saga.StepError](err); ok {
		return e.Public
	}
	if errors.Is(err, context.DeadlineExceeded) {
		return "it did not end in time"
	}
	return fault.From(err).Public
}

// lastCheck is the time that a step gets that begins after the deadline: what it waited for may have come.
const lastCheck = 2 * time.Second

var releaseTimeLeft = pg.Define(pg.RoleLifecycle, "workspace.release_time_left", `
		SELECT coalesce((SELECT extract(epoch FROM release_deadline_at - mesh.clock()) FROM lifecycle.allocation
			WHERE workspace_id = $1 AND state = 'releasing'), 3600)::float8`)

// releaseLeft returns how long the release of the workspace's allocation may still take, by the database's clock; below
// zero once it is late, and an hour if no allocation of the workspace is being released.
func (s *Steps) releaseLeft(ctx context.Context, env *saga.Env) (time.Duration, error) {
	var left float64
	err := pg.QueryRow(ctx, s.deps.DB, releaseTimeLeft, env.WorkspaceID).Scan(&left)
	if err != nil {
		return 0, fmt.Errorf("read deadline of release: %w", err)
	}
	return time.Duration(left * float64(time.Second)), nil
}

var releaseIsLate = pg.Define(pg.RoleLifecycle, "workspace.release_is_late", `
		SELECT EXISTS (SELECT 1 FROM lifecycle.allocation WHERE workspace_id = $1
			AND (state = 'release_failed' OR state = 'releasing' AND release_deadline_at <= mesh.clock()))`)

// releaseLate reports whether the release of the workspace's allocation is past its deadline, or the sweep has found it
// late meanwhile.
func (s *Steps) releaseLate(ctx context.Context, env *saga.Env) bool {
	var late bool
	err := pg.QueryRow(ctx, s.deps.DB, releaseIsLate, env.WorkspaceID).Scan(&late)
	return err == nil && late
}

var lateReleases = pg.Define(pg.RoleLifecycle, "workspace.late_releases",
	`SELECT `+allocationColumns+` FROM lifecycle.allocation a
			WHERE a.state = 'releasing' AND a.release_deadline_at <= mesh.clock() - interval '30 seconds' AND NOT (SELECT mesh.rolled_back())
				-- A run that stands still has its deadlines moved on before it goes on.
				AND NOT EXISTS (SELECT 1 FROM lifecycle.run_pause p JOIN lifecycle.saga_run r ON r.id = p.run_id
					WHERE r.workspace_id = a.workspace_id AND p.since IS NOT NULL)
			ORDER BY a.allocation_id LIMIT 100 FOR UPDATE OF a SKIP LOCKED`)

// failLate makes allocations release_failed whose releases are long past their deadlines and whose runs have not
// failed: no driver drives such a run, or the call that it hangs on does not heed its context. A run that succeeds
// later releases the allocation then.
func failLate(ctx context.Context, db pg.Beginner) (int, error) {
	n := 0
	err := pg.InTx(ctx, db, func(ctx context.Context, tx pgx.Tx) error {
		n = 0
		if err := lockNodesOfLate(ctx, tx); err != nil {
			return err
		}
		late, err := allAllocations(ctx, tx, lateReleases)
		if err != nil {
			return fmt.Errorf("look for late releases: %w", err)
		}
		for _, a := range late {
			why := "no operation is open that releases it"
			run, open, err := saga.LiveRun(ctx, tx, a.WorkspaceID)
			if err != nil {
				return err
			}
			if open {
				why = fmt.Sprintf("operation %s is %s at the step %q: %s", run.ID, run.State, run.StepName(), run.WhyWaiting)
			}
			if err := failRelease(ctx, tx, a, "the release is past its deadline: "+why); err != nil {
				return err
			}
			n++
		}
		return nil
	})
	return n, err
}

var gatesOfLateReleases = pg.Define(pg.RoleLifecycle, "workspace.gates_of_late_releases", `
		SELECT FROM lifecycle.node_gate g WHERE g.node_id IN (SELECT a.node_id FROM lifecycle.allocation a
			WHERE a.state = 'releasing' AND a.release_deadline_at <= mesh.clock() - interval '30 seconds' AND NOT (SELECT mesh.rolled_back()))
		ORDER BY g.node_id FOR NO KEY UPDATE`)

// lockNodesOfLate locks the gates of the nodes whose releases are late: each of them may be cordoned.
func lockNodesOfLate(ctx context.Context, tx pgx.Tx) error {
	_, err := pg.Exec(ctx, tx, gatesOfLateReleases)
	if err != nil {
		return fmt.Errorf("lock gates of late releases: %w", err)
	}
	return nil
}

// forceTries is how often a step of a forced release is begun within its grace.
const forceTries = 2

// forced tries a step of a forced release for a short while; then the claims of what could not be cleaned become
// orphans, and the release goes on.
func (s *Steps) forced(do saga.StepFunc, last bool, kinds ...string) saga.StepFunc {
	return func(ctx context.Context, env *saga.Env) (saga.Outcome, error) {
		if env.Kind != kForceRelease {
			return do(ctx, env)
		}
		grace := orDefault(s.deps.ForceGrace, ForceGrace)
		age, err := s.stepAge(ctx, env)
		if err != nil {
			return saga.Outcome{}, err
		}
		// A driver that comes to the step after the grace, since the one before has died, still tries it once more.
		bounded, cancel := context.WithTimeout(ctx, max(grace-age, lastCheck))
		defer cancel()
		out, err := do(bounded, env)
		if ctx.Err() == nil && err == nil && last && !out.Waits() {
			return s.freeWithOrphans(ctx, env, out, kinds)
		}
		if ctx.Err() != nil || saga.Interrupted(err) || err == nil && (!out.Waits() || age < grace) {
			return out, err
		}
		why := fmt.Sprintf("it was not done within %s", grace)
		if err != nil && bounded.Err() == nil {
			e, ok := errors.AsType[*saga.StepError](err)
			if env.Attempt < forceTries && age < grace && (!ok || e.Retryable) {
				if !ok { // a fault that counts as final must not make a forced release stuck
					err = saga.Retry(layerOf(err), fault.ReasonOf(err), publicOf(err), err)
				}
				return saga.Outcome{}, err
			}
			why = publicOf(err)
		}
		return s.concede(ctx, env, last, why, kinds)
	}
}

var ageOfStep = pg.Define(pg.RoleLifecycle, "workspace.age_of_step", `
		SELECT coalesce(extract(epoch FROM mesh.clock() - least(
			(SELECT min(s.started_at) FROM lifecycle.saga_step s WHERE s.run_id = $1 AND s.step = $2),
			(SELECT r.open_since FROM lifecycle.saga_run r WHERE r.id = $1 AND r.step = $2 AND r.open_attempt > 0)
		) - coalesce((SELECT p.total FROM lifecycle.run_pause p WHERE p.run_id = $1), '0')), 0)::float8`)

// stepAge returns how long ago the run came to its present step.
func (s *Steps) stepAge(ctx context.Context, env *saga.Env) (time.Duration, error) {
	var age float64
	err := pg.QueryRow(ctx, s.deps.DB, ageOfStep, env.RunID, env.Step).Scan(&age)
	if err != nil {
		return 0, fmt.Errorf("read age of step: %w", err)
	}
	return time.Duration(age * float64(time.Second)), nil
}

// freeWithOrphans ends the last step of a forced release after it has cleaned all that it could: orphans of an earlier
// operation, as of an undo that was skipped, do not keep the allocation from being released for a person who has given
// a proof.
func (s *Steps) freeWithOrphans(ctx context.Context, env *saga.Env, cleaned saga.Outcome, kinds []string) (saga.Outcome,
	error,
) {
	a, held, err := liveAllocation(ctx, s.deps.DB, env.WorkspaceID)
	if err != nil || !held {
		return cleaned, err
	}
	left, err := orphansOf(ctx, s.deps.DB, env.WorkspaceID, a.Epoch)
	if err != nil || left == 0 {
		return cleaned, err
	}
	return s.concede(ctx, env, true, fmt.Sprintf("%d resources were given up before", left), kinds)
}

// concede leaves what a step could not clean behind as orphan claims, on the attestation of a person. The last step
// also releases the allocation: the driver lets a later epoch be launched, and the machine stays cordoned until the
// orphans are reaped.
func (s *Steps) concede(ctx context.Context, env *saga.Env, last bool, why string, kinds []string) (saga.Outcome,
	error,
) {
	in, _, err := readInput(env.Input)
	if err != nil {
		return saga.Outcome{}, err
	}
	if in.Word == nil {
		return saga.Outcome{}, saga.Fail(commonv1.OwnerLayer_OWNER_LAYER_WORKFLOW, commonv1.Reason_REASON_INTERNAL,
			"a forced release carries no person's word", nil)
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
		if err := env.Proceed(ctx); err != nil {
			return saga.Outcome{}, err
		}
		if driver, ok := s.deps.Drivers[a.Placement]; ok {
			if err := driver.Fence(ctx, env.WorkspaceID, a.Epoch, in.Word.String()); err != nil {
				return saga.Outcome{}, saga.Retry(commonv1.OwnerLayer_OWNER_LAYER_DEPLOY, fault.ReasonOf(err),
					"the placement did not write the fenced proof down", err)
			}
		}
	}
	return saga.Done(nil, func(ctx context.Context, tx pgx.Tx) error {
		for _, c := range claims {
			// A slot is a row of this database, and a machine that existed before the workspace has no instance of its own: both
			// claims are released with the allocation.
			if c.Kind == kindSlot || c.Kind == kindInstance && held && !ownInstance(a.Placement) {
				if err := env.ReleaseTx(ctx, tx, c); err != nil {
					return fmt.Errorf("release %s: %w", c.Kind, err)
				}
				continue
			}
			if err := env.OrphanTx(ctx, tx, c, in.Word.By,
				fmt.Sprintf("force-released on proof %s (%s); %s", in.Word.Proof, in.Word.Reason, why)); err != nil {
				return fmt.Errorf("orphan %s: %w", c.Kind, err)
			}
		}
		if !last {
			return tellOrphans(ctx, tx, env.WorkspaceID, a.Epoch)
		}
		return s.freeAllocation(ctx, tx, env, in.Word)
	}).After(lockNodes(env)), nil
}

// freeAllocation ends a forced release: the allocation is released, and its machine cordoned for as long as something
// was left there.
func (s *Steps) freeAllocation(ctx context.Context, tx pgx.Tx, env *saga.Env, w *attestation) error {
	a, held, err := liveAllocation(ctx, tx, env.WorkspaceID)
	if err != nil || !held {
		return err
	}
	i, ok, err := instanceOf(ctx, tx, env.WorkspaceID, a.Epoch)
	if err != nil {
		return err
	}
	if ok && i.State != commonv1.InstanceState_INSTANCE_STATE_ENDED {
		if _, err := setInstance(ctx, tx, i, commonv1.InstanceState_INSTANCE_STATE_ENDED, "", "",
			"force-released: "+w.String()); err != nil {
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

var leftOnMachine = pg.Define(pg.RoleLifecycle, "workspace.left_on_machine", `
		SELECT EXISTS (SELECT 1 FROM lifecycle.resource_claim c WHERE c.node_id = $1 AND c.kind = ANY ($2) AND c.orphaned_at IS NOT NULL AND c.released_at IS NULL)
			OR EXISTS (SELECT 1 FROM lifecycle.allocation a WHERE a.node_id = $1 AND a.state = 'release_failed')`)

// uncordonClean removes the cordon of cordonOwner from a machine on which nothing is left of a release.
func uncordonClean(ctx context.Context, tx pgx.Tx, nodeID string) error {
	var left bool
	err := pg.QueryRow(ctx, tx, leftOnMachine, nodeID, occupying()).Scan(&left)
	if err != nil {
		return fmt.Errorf("look for what is left: %w", err)
	}
	if left {
		return nil
	}
	if err := gate.EndCordonOf(ctx, tx, nodeID, cordonOwner); err != nil {
		return fmt.Errorf("uncordon node: %w", err)
	}
	return nil
}
