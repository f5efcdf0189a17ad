package operation

import (
	"fmt"
	"testing"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
)

// TestAReleaseOutlivesItsDrivers has the driver of a retried and of a forced release die at every point in turn, until
// one gets through without.
func TestAReleaseOutlivesItsDrivers(t *testing.T) {
	t.Parallel()
	g := newStage(t, nil)
	tenant := g.tenant()
	for _, force := range []bool{false, true} {
		deaths := 0
		for points := int64(1); ; points++ {
			if points > 60 {
				t.Fatal("a release has more points than it could")
			}
			if !g.releaseWithDeath(tenant, fmt.Sprintf("w%d-%v", points, force), points, force) {
				break
			}
			deaths++
		}
		if deaths < 8 {
			t.Errorf("force %v: drivers died at %d points only", force, deaths)
		}
	}
	if n := g.count(`SELECT count(*) FROM lifecycle.resource_claim WHERE released_at IS NULL`); n != 0 {
		t.Errorf("%d claims are left", n)
	}
	if got := g.world.standing(); len(got) != 0 {
		t.Errorf("left standing: %v", got)
	}
}

// releaseWithDeath makes a workspace whose release has failed, releases it with a driver that dies after so many
// points, and returns whether the driver died.
func (g *stage) releaseWithDeath(tenant, name string, points int64, force bool) bool {
	g.t.Helper()
	ctx := operator(g.t.Context())
	res, err := g.seats[0].server.RequestOperation(ctx, &lifecyclev1.RequestOperationRequest{
		Kind: commonv1.OperationKind_OPERATION_KIND_CREATE,
		Target: &lifecyclev1.RequestOperationRequest_Create{Create: &lifecyclev1.CreateWorkspace{
			Tenant: tenant, Name: name, Spec: &lifecyclev1.WorkspaceSpec{Placement: byProcess},
		}},
	})
	if err != nil {
		g.t.Fatal(err)
	}
	id := res.GetOperation().GetWorkspaceId()
	until := func(state string) func() bool { return func() bool { return g.workspace(id).State == state } }
	g.drive(0, until("active"))
	if _, err := g.seats[0].ask(ctx, kDecommission, id); err != nil {
		g.t.Fatal(err)
	}
	g.mu.Lock()
	g.faults["Release storage and box/do"] = failsBefore
	g.mu.Unlock()
	g.drive(0, until("stuck"))
	g.mu.Lock()
	clear(g.faults)
	g.mu.Unlock()
	a := g.newest(id)
	if a.State != commonv1.AllocationState_ALLOCATION_STATE_RELEASE_FAILED {
		g.t.Fatalf("its hold is %+v", a)
	}
	allocations := NewAllocations(g.seats[0].server)
	if force {
		req := &lifecyclev1.ForceReleaseRequest{
			AllocationId: a.ID, ExpectedFence: a.Fence, FencedProof: commonv1.FencedProof_FENCED_PROOF_REIMAGED,
			Reason: "a test", DryRun: true,
		}
		dry, err := allocations.ForceRelease(ctx, req)
		if err != nil {
			g.t.Fatal(err)
		}
		req.DryRun = false
		for _, c := range dry.GetClaims() {
			req.AckOrphans = append(req.AckOrphans, c.GetClaimId())
		}
		if _, err = allocations.ForceRelease(ctx, req); err != nil {
			g.t.Fatal(err)
		}
	} else if _, err := allocations.RetryRelease(ctx, &lifecyclev1.RetryReleaseRequest{AllocationId: a.ID}); err != nil {
		g.t.Fatal(err)
	}
	died := g.drive(points, until("decommissioned"))
	if died {
		g.drive(0, until("decommissioned"))
	}
	if now := g.newest(id); now.State != commonv1.AllocationState_ALLOCATION_STATE_RELEASED || now.Occupancy != "none" ||
		g.workspace(id).State != "decommissioned" {
		g.t.Fatalf("after a death at point %d its hold is %+v, the workspace %s", points, now, g.workspace(id).State)
	}
	return died
}
