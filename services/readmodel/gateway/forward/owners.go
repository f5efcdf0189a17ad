package forward

import (
	"context"
	"errors"
	"fmt"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1/lifecyclev1connect"
	"github.com/gpuaas/mesh/gen/gpuaas/recovery/v1/recoveryv1connect"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/services/readmodel/gateway/caller"
)

// Owners are the clients of the services that own the state. Each call asserts the person of the context.
type Owners struct {
	Workspaces  lifecyclev1connect.WorkspaceServiceClient
	Allocations lifecyclev1connect.AllocationServiceClient
	Findings    lifecyclev1connect.FindingServiceClient
	Instances   lifecyclev1connect.InstanceServiceClient
	Outputs     lifecyclev1connect.OutputServiceClient
	Tasks       lifecyclev1connect.TaskServiceClient
	Gates       lifecyclev1connect.GateServiceClient
	Identities  recoveryv1connect.IdentityServiceClient
	Policies    recoveryv1connect.PolicyServiceClient
	Watchdog    recoveryv1connect.WatchdogServiceClient
	Rollback    recoveryv1connect.RollbackServiceClient
	HostFacts   recoveryv1connect.HostFactsServiceClient
	Keys        recoveryv1connect.KeyServiceClient
	Tokens      recoveryv1connect.TokenServiceClient
	Actions     recoveryv1connect.ActionServiceClient
	Health      recoveryv1connect.HealthServiceClient
	Diagnostics recoveryv1connect.DiagnosticsServiceClient
	Collected   lifecyclev1connect.DiagnosticsServiceClient
	Trust       recoveryv1connect.TrustServiceClient
	Profiles    recoveryv1connect.ProfileServiceClient
	Bundles     recoveryv1connect.BundleServiceClient
	Authority   recoveryv1connect.AuthorityServiceClient
}

// OwnerError is a refusal by an owner, which has recorded it in its own audit entries.
type OwnerError struct{ error }

// Unwrap returns the owner's fault.
func (e *OwnerError) Unwrap() error { return e.error }

// Refused returns the error to pass to the person for an owner's error; nil for none. If the owner refused readmodel
// itself and not the person, the person gets an internal error.
func Refused(owner string, err error) error {
	switch reason := fault.ReasonOf(err); {
	case err == nil:
		return nil
	case reason == commonv1.Reason_REASON_UNAUTHENTICATED, reason == commonv1.Reason_REASON_ASSERTION_INVALID:
		return fmt.Errorf("%s refused us: %w", owner, errors.New(err.Error()))
	default:
		return &OwnerError{err}
	}
}

// operator returns what an owner answers to a call for a person of the operator. It refuses other people.
func operator[Q, A any](ctx context.Context, owner string, call func(context.Context, Q) (A, error), req Q) (A, error) {
	if err := caller.OperatorsOnly(ctx); err != nil {
		var none A
		return none, err
	}
	answer, err := call(ctx, req)
	return answer, Refused(owner, err)
}
