package provision

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/allocation"
	"github.com/gpuaas/mesh/services/lifecycle/placement"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
	"github.com/gpuaas/mesh/services/lifecycle/spec"
)

// timely makes fn part of the release of the workspace's allocation: the first such step begins the release, no such
// step outlasts the release's deadline, whatever it hangs on, and a step that has not ended by then ends the run as
// stuck, which makes the allocation release_failed.
func (s *Steps) timely(fn saga.StepFunc) saga.StepFunc {
	return func(ctx context.Context, env *saga.Env) (saga.Outcome, error) {
		a, held, err := allocation.Live(ctx, s.deps.DB, env.WorkspaceID)
		if err != nil {
			return saga.Outcome{}, err
		}
		if held && a.State != commonv1.AllocationState_ALLOCATION_STATE_RELEASING {
			err := env.Tx(ctx, func(ctx context.Context, tx pgx.Tx) error {
				return allocation.BeginRelease(ctx, tx, a, orDefault(s.deps.ReleaseDeadline, allocation.ReleaseDeadline))
			})
			if err != nil {
				return saga.Outcome{}, fmt.Errorf("begin release: %w", err)
			}
			s.deps.Committed()
		}
		if !held || env.Kind == commonv1.OperationKind_OPERATION_KIND_FORCE_RELEASE { // a forced one has deadlines of its own
			return fn(ctx, env)
		}
		left, err := allocation.TimeLeft(ctx, s.deps.DB, env.WorkspaceID)
		if err != nil {
			return saga.Outcome{}, err
		}
		bounded, cancel := context.WithTimeout(ctx, max(left, lastCheck))
		defer cancel()
		out, err := fn(bounded, env)
		if ctx.Err() != nil || saga.Interrupted(err) || err == nil && !out.Waits() ||
			!allocation.Late(ctx, s.deps.DB, env.WorkspaceID) {
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

// forceTries is how often a step of a forced release is begun within its grace.
const forceTries = 2

// forced tries a step of a forced release for a short while; then the claims of what could not be cleaned become
// orphans, and the release goes on.
func (s *Steps) forced(do saga.StepFunc, last bool, kinds ...string) saga.StepFunc {
	return func(ctx context.Context, env *saga.Env) (saga.Outcome, error) {
		if env.Kind != commonv1.OperationKind_OPERATION_KIND_FORCE_RELEASE {
			return do(ctx, env)
		}
		grace := orDefault(s.deps.ForceGrace, allocation.ForceGrace)
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

var ageOfStep = pg.Define(pg.RoleLifecycle, "provision.age_of_step", `
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
	a, held, err := allocation.Live(ctx, s.deps.DB, env.WorkspaceID)
	if err != nil || !held {
		return cleaned, err
	}
	left, err := allocation.CountOrphans(ctx, s.deps.DB, env.WorkspaceID, a.Epoch)
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
	in, _, err := spec.Read(env.Input)
	if err != nil {
		return saga.Outcome{}, err
	}
	if in.Attestation == nil {
		return saga.Outcome{}, saga.Fail(commonv1.OwnerLayer_OWNER_LAYER_WORKFLOW, commonv1.Reason_REASON_INTERNAL,
			"a forced release carries no person's word", nil)
	}
	held, err := claimsOf(ctx, env, kinds...)
	if err != nil {
		return saga.Outcome{}, err
	}
	a, allocated, err := allocation.Live(ctx, s.deps.DB, env.WorkspaceID)
	if err != nil {
		return saga.Outcome{}, err
	}
	if last && allocated {
		if err := env.Proceed(ctx); err != nil {
			return saga.Outcome{}, err
		}
		if driver, ok := s.deps.Drivers[a.Placement]; ok {
			if err := driver.Fence(ctx, env.WorkspaceID, a.Epoch, in.Attestation.String()); err != nil {
				return saga.Outcome{}, saga.Retry(commonv1.OwnerLayer_OWNER_LAYER_DEPLOY, fault.ReasonOf(err),
					"the placement did not write the fenced proof down", err)
			}
		}
	}
	return saga.Done(nil, func(ctx context.Context, tx pgx.Tx) error {
		for _, c := range held {
			// A slot is a row of this database, and a machine that existed before the workspace has no instance of its own: both
			// claims are released with the allocation.
			if c.Kind == allocation.KindSlot || c.Kind == allocation.KindInstance && allocated &&
				!placement.HasOwnInstance(a.Placement) {
				if err := env.ReleaseTx(ctx, tx, c); err != nil {
					return fmt.Errorf("release %s: %w", c.Kind, err)
				}
				continue
			}
			if err := env.OrphanTx(ctx, tx, c, in.Attestation.By,
				fmt.Sprintf("force-released on proof %s (%s); %s", in.Attestation.Proof, in.Attestation.Reason, why)); err != nil {
				return fmt.Errorf("orphan %s: %w", c.Kind, err)
			}
		}
		if !last {
			return allocation.AnnounceOrphans(ctx, tx, env.WorkspaceID, a.Epoch)
		}
		return allocation.FreeForced(ctx, tx, env.WorkspaceID, in.Attestation)
	}).After(lockNodes(env)), nil
}
