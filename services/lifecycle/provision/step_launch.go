package provision

import (
	"context"
	"crypto/sha256"
	"fmt"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/services/lifecycle/allocation"
	"github.com/gpuaas/mesh/services/lifecycle/claims"
	"github.com/gpuaas/mesh/services/lifecycle/placement"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
)

// launch has the instance made, if its placement makes one, and records it. An instance that is recorded as live is not
// launched again.
func (s *Steps) launch(ctx context.Context, env *saga.Env, p *place) (string, error) {
	i, err := s.launchInstance(ctx, env, p)
	switch {
	case fault.Has(err, commonv1.Reason_REASON_PREVIOUS_EPOCH_ALIVE):
		// The former instance is ended well within the budget of this step, by the sweep of the placement's own list at the
		// latest.
		_ = s.deps.EpochRefusals.Note(atLaunch,
			saga.Retry(commonv1.OwnerLayer_OWNER_LAYER_DEPLOY, fault.ReasonOf(err), fault.From(err).Public, err))
		return previousAlive(err), nil
	case err != nil:
		return "", s.deps.EpochRefusals.Note(atLaunch, err)
	}
	p.instance = i
	return "", nil
}

func (s *Steps) launchInstance(ctx context.Context, env *saga.Env, p *place) (allocation.Instance, error) {
	a, i := p.allocation, p.instance
	switch i.State {
	case commonv1.InstanceState_INSTANCE_STATE_LIVE:
		return i, nil
	case commonv1.InstanceState_INSTANCE_STATE_ENDING, commonv1.InstanceState_INSTANCE_STATE_ENDED:
		return i, saga.Fail(commonv1.OwnerLayer_OWNER_LAYER_WORKFLOW, commonv1.Reason_REASON_EPOCH_ENDED,
			"the instance of this epoch has ended", nil)
	default:
	}
	theInstance := placement.LaunchRequest{
		WorkspaceID: env.WorkspaceID, TenantID: env.TenantID, Epoch: env.Epoch, InstanceID: i.ID, NodeID: a.NodeID,
		GPUs: p.spec.GetGpus(), NodeName: fmt.Sprintf("box-%s-%d", env.WorkspaceID[len(env.WorkspaceID)-12:], env.Epoch),
		Permit: env.Proceed,
	}
	node := a.NodeID
	if placement.HasOwnInstance(a.Placement) {
		theInstance.LaunchSecret = s.launchSecret(i.ID)
		var err error
		if node, err = s.prepareIdentity(ctx, env, i, theInstance); err != nil {
			return i, err
		}
	}
	claim, _, err := env.Intent(ctx,
		claims.Spec{
			Kind: allocation.KindInstance, Name: fmt.Sprintf("%s:%d", env.WorkspaceID, env.Epoch),
			Scope: commonv1.ClaimScope_CLAIM_SCOPE_SHARED, NodeID: node,
		})
	if err != nil {
		return i, fmt.Errorf("claim instance: %w", err)
	}
	if i.State == commonv1.InstanceState_INSTANCE_STATE_PREPARED {
		var moved allocation.Instance
		err = env.Tx(ctx, func(ctx context.Context, tx pgx.Tx) error {
			var err error
			moved, err = allocation.SetInstance(ctx, tx, i, commonv1.InstanceState_INSTANCE_STATE_LAUNCHING, "", node, "")
			return err
		})
		if err != nil {
			return i, fmt.Errorf("mark launching: %w", err)
		}
		i = moved
	}
	launched, err := p.driver.Launch(ctx, theInstance)
	if err != nil {
		return i, s.notLaunched(ctx, env, claim, i, err)
	}
	var live allocation.Instance
	err = env.TxInto(ctx, stageConnect, func(ctx context.Context, tx pgx.Tx) error {
		if err := env.ConfirmTx(ctx, tx, claim, launched.ProviderID); err != nil {
			return fmt.Errorf("confirm instance: %w", err)
		}
		var err error
		live, err = allocation.SetInstance(ctx, tx, i, commonv1.InstanceState_INSTANCE_STATE_LIVE, launched.ProviderID, node,
			"")
		return err
	})
	if err != nil {
		return i, fmt.Errorf("mark live: %w", err)
	}
	i = live
	s.deps.Committed()
	if err := env.Progress(ctx, "launched "+launched.ProviderID); err != nil {
		return i, fmt.Errorf("report progress: %w", err)
	}
	return i, nil
}

// prepareIdentity has recovery register the identity of an instance before its launch, confirms the claim on it, and
// returns the id of the node that the instance will be.
func (s *Steps) prepareIdentity(ctx context.Context, env *saga.Env, i allocation.Instance,
	theInstance placement.LaunchRequest,
) (string, error) {
	claim, _, err := env.Intent(ctx,
		claims.Spec{Kind: allocation.KindIdentity, Name: i.ID, Scope: commonv1.ClaimScope_CLAIM_SCOPE_SHARED})
	if err != nil {
		return "", fmt.Errorf("claim identity: %w", err)
	}
	sum := sha256.Sum256([]byte(theInstance.LaunchSecret))
	prepared, err := s.deps.Identities.PrepareInstance(ctx, &recoveryv1.PrepareInstanceRequest{
		WorkspaceId: env.WorkspaceID, TenantId: env.TenantID, Epoch: env.Epoch, InstanceId: i.ID, SecretSha256: sum[:],
		NodeName: theInstance.NodeName,
	})
	if err != nil {
		return "", saga.Retry(commonv1.OwnerLayer_OWNER_LAYER_CERT, fault.ReasonOf(err),
			"recovery did not prepare the instance's identity", err)
	}
	if claim.ConfirmedAt != nil {
		return prepared.GetNodeId(), nil
	}
	err = env.Tx(
		ctx, func(ctx context.Context, tx pgx.Tx) error { return env.ConfirmTx(ctx, tx, claim, prepared.GetNodeId()) },
	)
	if err != nil {
		return "", fmt.Errorf("confirm identity: %w", err)
	}
	return prepared.GetNodeId(), nil
}

// notLaunched returns what a driver's refusal means for the step. The refusal that a former instance is not confirmed
// ended is returned unchanged, and the step waits.
func (s *Steps) notLaunched(ctx context.Context, env *saga.Env, claim claims.Claim, i allocation.Instance,
	refusal error,
) error {
	reason, public := fault.ReasonOf(refusal), fault.From(refusal).Public
	switch reason { // everything else may be tried again
	case commonv1.Reason_REASON_PREVIOUS_EPOCH_ALIVE:
		return refusal
	case commonv1.Reason_REASON_EPOCH_ENDED, commonv1.Reason_REASON_EPOCH_SUPERSEDED:
		return saga.Fail(commonv1.OwnerLayer_OWNER_LAYER_DEPLOY, reason, public, refusal)
	case commonv1.Reason_REASON_INSTANCE_OF_LOST_HISTORY:
		// The refusal is evidence, and is reported to recovery first. If recovery sets rollback mode, the run stops here,
		// with no claim given up.
		if s.deps.LaunchLog != nil {
			if err := s.deps.LaunchLog.Check(ctx); err != nil {
				return saga.Retry(commonv1.OwnerLayer_OWNER_LAYER_DEPLOY, fault.ReasonOf(err), public, err)
			}
		}
		// No instance of this run exists there. Without the claim, no undo ends the instance that does exist, which may run a
		// tenant's work.
		err := env.Tx(ctx, func(ctx context.Context, tx pgx.Tx) error {
			if err := env.ReleaseTx(ctx, tx, claim); err != nil {
				return fmt.Errorf("release instance: %w", err)
			}
			_, err := allocation.SetInstance(ctx, tx, i, commonv1.InstanceState_INSTANCE_STATE_ENDED, "", "",
				"never launched: "+public)
			return err
		})
		if err != nil {
			return fmt.Errorf("give up launch: %w", err)
		}
		s.deps.Committed()
		return saga.Fail(commonv1.OwnerLayer_OWNER_LAYER_DEPLOY, reason, public, refusal)
	default:
		return saga.Retry(commonv1.OwnerLayer_OWNER_LAYER_DEPLOY, reason, public, refusal)
	}
}

// previousAlive returns the text that the timeline shows while the step waits for the end of a former instance.
func previousAlive(err error) string {
	f := fault.From(err)
	why := names.Of(f.Reason) + ": waiting for the end of a former instance: " + f.Public
	if f.ConflictingID != "" {
		why += " (" + f.ConflictingID + ")"
	}
	return why
}
