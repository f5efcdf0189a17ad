package operation

import (
	"fmt"
	"strings"
	"testing"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/provision"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
	"github.com/gpuaas/mesh/services/lifecycle/saga/stall"
)

// A workload that runs and is never ready is probed every second, and its wait is flagged as stalled even so: after the
// ten minutes of a wait, until it makes progress.
func TestAWaitThatIsNeverReadyIsFlagged(t *testing.T) {
	p := newCluster(t, clusterConfig{seats: 1, lease: 15 * time.Second})
	p.world.mu.Lock()
	p.world.unready = true
	p.world.mu.Unlock()
	res, err := p.seats[0].server.RequestOperation(t.Context(), &lifecyclev1.RequestOperationRequest{
		Kind: commonv1.OperationKind_OPERATION_KIND_CREATE, Target: &lifecyclev1.RequestOperationRequest_Create{
			Create: &lifecyclev1.CreateWorkspace{
				Tenant: p.tenant(), Name: "demo",
				Spec: &lifecyclev1.WorkspaceSpec{Placement: byProcess, Gpus: 1},
			},
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	id := res.GetOperation().GetWorkspaceId()
	run := func() runs.Run {
		t.Helper()
		r, _, err := runs.Live(testkit.Context(t), p.seats[0].pool, id)
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	probes := func() int {
		t.Helper()
		return p.count(`SELECT count(*) FROM lifecycle.task
			WHERE workspace_id = $1 AND type = 'workload.status' AND state = 'succeeded'`, id)
	}
	more := func(than int) int {
		t.Helper()
		testkit.Eventually(t, testkit.Patience, func() error {
			// A probe task that was open when the clock was moved has expired: lifecycle's sweep ends it.
			if _, err := p.world.tasks.Sweep(testkit.Context(t)); err != nil {
				return err
			}
			if n := probes(); n < than {
				r := run()
				return fmt.Errorf("%d looks at the workloads; the run is at %q: %s", n, r.StepName(), r.WhyWaiting)
			}
			return nil
		})
		return probes()
	}
	more(3)
	p.unleased(run().ID, func() { testkit.SetClockOffset(p.db, 5*time.Minute) })
	if _, err := stall.Mark(testkit.Context(t), p.seats[0].core, time.Hour); err != nil {
		t.Fatal(err)
	}
	if r := run(); r.StepName() != provision.StepReady || r.StuckReason != "" {
		t.Errorf("after five minutes at %q: %q", r.StepName(), r.StuckReason)
	}
	p.unleased(run().ID, func() { testkit.SetClockOffset(p.db, 11*time.Minute) })
	const flag = `step_stalled: no progress at "Wait for workloads ready" for 00:10:00`
	testkit.Eventually(t, testkit.Patience, func() error {
		if r := run(); !strings.HasPrefix(r.StuckReason, flag) {
			return fmt.Errorf("at %q: %q", r.StepName(), r.StuckReason)
		}
		return nil
	})
	more(probes() + 3)
	if r := run(); !strings.HasPrefix(r.StuckReason, flag) {
		t.Errorf("looks that found nothing new took it back: %q", r.StuckReason)
	}
	p.world.mu.Lock()
	p.world.unready = false
	p.world.mu.Unlock()
	p.rests(id, "active")
}
