package operation

import (
	"fmt"
	"strings"
	"testing"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/testkit"
)

const rolledBack = commonv1.Reason_REASON_CONTROL_PLANE_ROLLBACK

// Every command that would begin, end or change something is refused in rollback mode, and the table of actions refuses
// the same commands.
func TestCommandsAreRefusedInRollbackMode(t *testing.T) {
	p := newCluster(t, clusterConfig{seats: 1, lease: 15 * time.Second})
	tenant := p.tenant()
	id := p.create(tenant, "demo", byProcess)
	testkit.SetRollback(p.db, true)
	seat := p.seats[0]
	runs := p.count(`SELECT count(*) FROM lifecycle.saga_run`)
	refused := func(what string, err error) {
		t.Helper()
		if !fault.Has(err, rolledBack) {
			t.Errorf("%s is answered %v", what, err)
			return
		}
		if f := fault.From(err); !strings.Contains(f.Remedy, "gpuaas rollback accept") {
			t.Errorf("%s: the remedy is %q", what, f.Remedy)
		}
	}
	for _, kind := range []commonv1.OperationKind{
		kRecreate, kDecommission, kRetry, kReset, kCancel, kRetryUndo,
		kSkipUndo,
	} {
		_, err := seat.ask(operator(t.Context()), kind, id, func(r *lifecyclev1.RequestOperationRequest) { r.Reason = "x" })
		refused(kind.String(), err)
	}
	_, err := seat.ask(operator(t.Context()), kRecreate, id,
		func(r *lifecyclev1.RequestOperationRequest) { r.DryRun = true })
	refused("a dry run", err)
	_, err = seat.server.RequestOperation(t.Context(), &lifecyclev1.RequestOperationRequest{
		Kind: commonv1.OperationKind_OPERATION_KIND_CREATE,
		Target: &lifecyclev1.RequestOperationRequest_Create{Create: &lifecyclev1.CreateWorkspace{
			Tenant: tenant, Name: "other", Spec: &lifecyclev1.WorkspaceSpec{Placement: byProcess},
		}},
	})
	refused("a create", err)
	_, err = seat.server.CreateTenant(t.Context(), &lifecyclev1.CreateTenantRequest{Name: "late"})
	refused("a tenant", err)
	releases := NewAllocations(seat.server)
	_, err = releases.RetryRelease(operator(t.Context()), &lifecyclev1.RetryReleaseRequest{AllocationId: ids.New()})
	refused("a release", err)
	_, err = releases.ForceRelease(operator(t.Context()), &lifecyclev1.ForceReleaseRequest{AllocationId: ids.New()})
	refused("a forced release", err)
	actions, err := seat.server.GetActions(t.Context(), &lifecyclev1.GetActionsRequest{WorkspaceId: id})
	if err != nil || len(actions.GetActions()) == 0 {
		t.Fatal(err)
	}
	for _, o := range actions.GetActions() {
		if o.GetPossible() || o.GetReason() != rolledBack {
			t.Errorf("%v is shown as possible %v, reason %v", o.GetKind(), o.GetPossible(), o.GetReason())
		}
	}
	if n := p.count(`SELECT count(*) FROM lifecycle.saga_run`); n != runs {
		t.Errorf("%d runs, there were %d", n, runs)
	}
	testkit.SetRollback(p.db, false)
	if _, err := seat.ask(t.Context(), kRecreate, id); err != nil {
		t.Fatal(err)
	}
	if w := p.rests(id, "active"); w.Epoch != 2 {
		t.Errorf("it is in epoch %d", w.Epoch)
	}
}

// A create that is under way launches nothing in rollback mode, and goes on afterwards.
func TestNothingIsLaunchedInRollbackMode(t *testing.T) {
	p := newCluster(t, clusterConfig{seats: 1, lease: 15 * time.Second})
	tenant := p.tenant()
	thaw := p.seats[0].freeze() // the run exists before the mode is set, and its driver takes it up in the mode
	pool := p.db.Pool("lifecycle")
	server := *p.seats[0].server
	server.deps.DB = pool
	res, err := server.RequestOperation(t.Context(), &lifecyclev1.RequestOperationRequest{
		Kind: commonv1.OperationKind_OPERATION_KIND_CREATE,
		Target: &lifecyclev1.RequestOperationRequest_Create{Create: &lifecyclev1.CreateWorkspace{
			Tenant: tenant, Name: "demo", Spec: &lifecyclev1.WorkspaceSpec{Placement: byProcess},
		}},
	})
	if err != nil {
		t.Fatal(err)
	}
	id := res.GetOperation().GetWorkspaceId()
	testkit.SetRollback(p.db, true)
	thaw()
	testkit.Eventually(t, testkit.Patience, func() error {
		n := p.count(`SELECT count(*) FROM lifecycle.saga_run
			WHERE workspace_id = $1 AND state = 'waiting' AND starts_with(why_waiting, 'control_plane_rollback')`, id)
		if n != 1 {
			return fmt.Errorf("the run does not stand still")
		}
		return nil
	})
	p.world.mu.Lock()
	launches := len(p.world.launches)
	p.world.mu.Unlock()
	if launches != 0 {
		t.Errorf("%d launches in the mode", launches)
	}
	testkit.SetRollback(p.db, false)
	p.rests(id, "active")
}
