package operation

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/provision"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
)

// An operation that comes to a step at which recovery cannot be reached waits there, in one attempt, and goes on when
// recovery is back: that a service of the mesh is away says nothing about the workspace, and a recreation that failed
// would give up its storage.
func TestAnOperationOutlastsAnAbsenceOfRecovery(t *testing.T) {
	p := newCluster(t, clusterConfig{seats: 1, lease: time.Hour})
	res, err := p.seats[0].server.RequestOperation(t.Context(), p.withoutRecovery(&lifecyclev1.RequestOperationRequest{
		Kind: commonv1.OperationKind_OPERATION_KIND_CREATE,
		Target: &lifecyclev1.RequestOperationRequest_Create{Create: &lifecyclev1.CreateWorkspace{
			Tenant: p.tenant(), Name: "demo", Spec: &lifecyclev1.WorkspaceSpec{Placement: byProcess},
		}},
	}))
	if err != nil {
		t.Fatal(err)
	}
	id := res.GetOperation().GetWorkspaceId()
	on := p.outlasts(id, provision.StepStorage, 0)
	p.rests(id, "active")

	if _, err := p.seats[0].server.RequestOperation(t.Context(), p.withoutRecovery(&lifecyclev1.RequestOperationRequest{
		Kind: kRecreate, Target: &lifecyclev1.RequestOperationRequest_WorkspaceId{WorkspaceId: id}, Reason: "a test asks",
	})); err != nil {
		t.Fatal(err)
	}
	p.outlasts(id, provision.StepPrevious, on)
	if w := p.rests(id, "active"); w.Epoch != 2 || w.LastError != "" {
		t.Errorf("the workspace is in epoch %d, with the error %q", w.Epoch, w.LastError)
	}
	p.never("recovery was away")
	if got := p.world.standing(); len(got) != 4 || !slices.Contains(got, "box "+id+":2") {
		t.Errorf("there stand %q", got)
	}
}

// noEnd is more calls than a test makes.
const noEnd = 1 << 30

// withoutRecovery cuts recovery off before a request is made.
func (p *cluster) withoutRecovery(req *lifecyclev1.RequestOperationRequest) *lifecyclev1.RequestOperationRequest {
	p.world.mu.Lock()
	defer p.world.mu.Unlock()
	p.world.cutOff = noEnd
	return req
}

// outlasts waits until a step has called recovery more often than it may be attempted, checks that it is in its first
// attempt still, and brings recovery back. The mesh's clock goes on from on by a second with each check; outlasts
// returns where it is then.
func (p *cluster) outlasts(id, step string, on time.Duration) time.Duration {
	p.t.Helper()
	testkit.Eventually(p.t, testkit.Patience, func() error {
		on += time.Second
		testkit.SetClockOffset(p.db, on)
		if w := p.workspace(id); w.State == "failed" {
			p.t.Fatalf("the workspace has failed: %s", w.LastError)
		}
		p.world.mu.Lock()
		called := noEnd - p.world.cutOff
		p.world.mu.Unlock()
		if called < 10 {
			return fmt.Errorf("recovery was called %d times, %s later", called, on)
		}
		return nil
	})
	run, found, err := runs.Live(p.t.Context(), p.db.Pool(pg.RoleLifecycle), id)
	if err != nil || !found || run.StepName() != step {
		p.t.Fatalf("the run is %v at %q, not at %q: %v", found, run.StepName(), step, err)
	}
	all, err := runs.Timeline(p.t.Context(), p.db.Pool(pg.RoleLifecycle), run.ID)
	if err != nil {
		p.t.Fatal(err)
	}
	i := slices.IndexFunc(all, func(a runs.Attempt) bool { return a.Name == step })
	if i < 0 || all[i].Attempt != 1 || !strings.Contains(all[i].Error, "recovery") || all[i].ErrorLayer != "cert" {
		p.t.Errorf("the attempts are %+v", all)
	}
	p.world.mu.Lock()
	p.world.cutOff = 0
	p.world.mu.Unlock()
	testkit.SetClockOffset(p.db, on+time.Minute)
	return on + time.Minute
}
