package operation

import (
	"fmt"
	"testing"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
)

// A cancel returns at once, and the tasks that an agent was given are withdrawn while the agent is still silent.
func TestACancelReachesWhatAnAgentWasAskedToDo(t *testing.T) {
	p := newCluster(t, clusterConfig{seats: 1, lease: 15 * time.Second})
	p.world.mu.Lock()
	p.world.mute = true
	p.world.mu.Unlock()
	res, err := p.seats[0].server.RequestOperation(t.Context(), &lifecyclev1.RequestOperationRequest{
		Kind: commonv1.OperationKind_OPERATION_KIND_CREATE,
		Target: &lifecyclev1.RequestOperationRequest_Create{Create: &lifecyclev1.CreateWorkspace{
			Tenant: p.tenant(), Name: "demo", Spec: &lifecyclev1.WorkspaceSpec{Placement: byProcess},
		}},
	})
	if err != nil {
		t.Fatal(err)
	}
	op := res.GetOperation()
	asked := `SELECT count(*) FROM lifecycle.task WHERE run_id = $1 AND type = 'storage.allocate'`
	testkit.Eventually(t, testkit.Patience, func() error {
		if p.count(asked, op.GetOperationId()) == 0 {
			return fmt.Errorf("the agent was not asked for storage")
		}
		return nil
	})
	began := time.Now()
	cancelled, err := p.seats[0].ask(t.Context(), kCancel, op.GetWorkspaceId())
	if err != nil || cancelled.GetState() != commonv1.WorkspaceState_WORKSPACE_STATE_CANCELLING ||
		cancelled.GetOperationId() != op.GetOperationId() {
		t.Fatalf("a cancel was answered %v, %v", cancelled, err)
	}
	_, err = p.seats[0].ask(t.Context(), kReset, op.GetWorkspaceId())
	want(t, err, commonv1.Reason_REASON_PRECONDITION_FAILED)
	testkit.Eventually(t, testkit.Patience, func() error {
		if p.count(asked+` AND (cancel_requested_at IS NOT NULL OR state = 'cancelled')`, op.GetOperationId()) == 0 {
			run, _, err := runs.Live(t.Context(), p.seats[0].pool, op.GetWorkspaceId())
			return fmt.Errorf("the agent's task still stands; the run is %s (%s): %w", run.State, run.WhyWaiting, err)
		}
		return nil
	})
	t.Logf("taken back after %s", time.Since(began).Round(time.Millisecond))
	p.world.mu.Lock()
	p.world.mute = false
	p.world.mu.Unlock()
	p.rests(op.GetWorkspaceId(), "failed")
	if got := p.world.standing(); len(got) != 0 {
		t.Errorf("left standing: %v", got)
	}
}
