package forward

import (
	"context"
	"errors"
	"fmt"
	"slices"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/rpc"
	"github.com/gpuaas/mesh/services/readmodel/status"
	"github.com/gpuaas/mesh/services/readmodel/view"
)

// selfService are the operations by which a tenant brings back what fails. While people repair the machine of a
// workspace they are not offered: they would be done on, or away from, what is being repaired.
var selfService = []commonv1.OperationKind{
	commonv1.OperationKind_OPERATION_KIND_RECREATE, commonv1.OperationKind_OPERATION_KIND_RETRY,
}

// underRepair returns the refusal of an operation on a workspace whose machine people have to repair first; nil if it
// may be requested. It is nil where the target was read for people of the operator, for whom Repair is empty.
func underRepair(t view.Target, kind commonv1.OperationKind) error {
	if t.Repair.AskAgain == 0 || !slices.Contains(selfService, kind) {
		return nil
	}
	return fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED, "the workspace is being looked after by your operator",
		fault.WithAction(commonv1.Action_ACTION_WAIT), fault.RetryAfter(t.Repair.AskAgain),
		fault.Unmet(repairing(t)), fault.Remedy(status.FamilyOf(t.Repair.State).Text))
}

func repairing(t view.Target) string {
	return fmt.Sprintf("what the workspace runs on is under repair: ask again in %d minutes",
		int(t.Repair.AskAgain.Minutes()))
}

// waits is told of an operation that may be requested and cannot be completed before the agent of the machine is back.
const waits = "it cannot be completed before what the workspace runs on can be managed again"

// withWait adds to what an operation would do that it waits for the agent, if it does.
func withWait(t view.Target, kind commonv1.OperationKind, consequence string) string {
	if consequence == "" || !slices.Contains(t.Workspace.GetManagement().GetWaiting(), kind) {
		return consequence
	}
	return consequence + "; " + waits
}

// Actions adds to the options that lifecycle returned for a target which of them wait for the agent of its machine. A
// person of its tenant gets them without names of machines, and without those that are refused during a repair.
func Actions(ctx context.Context, t view.Target, options []*lifecyclev1.ActionOption) []*lifecyclev1.ActionOption {
	for _, o := range options {
		if o.GetPossible() {
			o.Consequence = withWait(t, o.GetKind(), o.GetConsequence())
		}
	}
	if !ofTenant(ctx) {
		return options
	}
	for _, o := range options {
		o.Consequence = t.WithoutMachines(o.GetConsequence())
		for i, text := range o.GetUnmet() {
			o.Unmet[i] = t.WithoutMachines(text)
		}
		switch {
		case underRepair(t, o.GetKind()) != nil:
			if reason := o.GetReason(); reason != commonv1.Reason_REASON_UNSPECIFIED && !fault.ForTenants(reason) {
				o.Reason, o.Unmet = commonv1.Reason_REASON_PRECONDITION_FAILED, nil
			}
			if o.GetPossible() {
				o.Possible, o.Reason = false, commonv1.Reason_REASON_PRECONDITION_FAILED
			}
			o.Unmet = append([]string{repairing(t)}, o.GetUnmet()...)
		case o.GetReason() == commonv1.Reason_REASON_UNSPECIFIED || fault.OfCaller(o.GetReason()):
		case !fault.ForTenants(o.GetReason()):
			o.Reason, o.Unmet = commonv1.Reason_REASON_UNAVAILABLE, []string{"your operator can see why"}
		default:
			o.Unmet = []string{fault.RowOf(o.GetReason()).Public}
		}
	}
	return options
}

// RefusedOn returns the error for the person for an owner's refusal of something on a target; nil for none. A person
// of a tenant gets the texts that are about their own request, and else the sentence of the catalogue, without a reason
// that is of a node.
func RefusedOn(ctx context.Context, owner string, t view.Target, err error) error {
	refused := Refused(owner, err)
	if _, decided := errors.AsType[*OwnerError](refused); !decided || !ofTenant(ctx) {
		return refused
	}
	f := fault.From(err)
	shown := *f
	if fault.OfCaller(f.Reason) {
		shown.Public, shown.Remedy = t.WithoutMachines(f.Public), t.WithoutMachines(f.Remedy)
		shown.Unmet = slices.Clone(f.Unmet)
		for i, text := range shown.Unmet {
			shown.Unmet[i] = t.WithoutMachines(text)
		}
		return &OwnerError{&shown}
	}
	shown.Action, shown.ConflictingID = fault.ActionOf(err), ""
	if !fault.ForTenants(f.Reason) {
		shown.Reason = commonv1.Reason_REASON_UNAVAILABLE
	}
	shown.Public, shown.Unmet = fault.RowOf(shown.Reason).Public, nil
	shown.Remedy = "wait, and ask your operator if it stays"
	return &OwnerError{&shown}
}

// operation returns an owner's answer as the person may see it.
func operation(ctx context.Context, t view.Target, o *lifecyclev1.Operation) *lifecyclev1.Operation {
	if o.GetDryRun() {
		o.Consequence = withWait(t, o.GetKind(), o.GetConsequence())
	}
	if o != nil && ofTenant(ctx) {
		o.Consequence, o.Advice = t.WithoutMachines(o.GetConsequence()), t.WithoutMachines(o.GetAdvice())
	}
	return o
}

// ofTenant reports whether the person behind a call is bound to a tenant.
func ofTenant(ctx context.Context) bool {
	p, ok := rpc.PersonFrom(ctx)
	return !ok || p.TenantID != ""
}
