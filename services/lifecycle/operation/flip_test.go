package operation

import (
	"testing"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/allocation"
)

// If the database refuses to make a workspace active, all resources are kept: after a reset the retry only makes it
// active, in the same epoch and on the same instance.
func TestAFlipThatFailsKeepsWhatWasMade(t *testing.T) {
	p := newCluster(t, clusterConfig{seats: 1, lease: 15 * time.Second})
	tenant := p.tenant()
	exec := func(sql string) {
		t.Helper()
		if _, err := p.db.OwnerPool().Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	exec(`CREATE FUNCTION lifecycle.no_flip() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION
		'the disk is full'; END $$;
		CREATE TRIGGER no_flip BEFORE UPDATE ON lifecycle.allocation
			FOR EACH ROW WHEN (NEW.state = 'active') EXECUTE FUNCTION lifecycle.no_flip()`)
	res, err := p.seats[0].server.RequestOperation(t.Context(), &lifecyclev1.RequestOperationRequest{
		Kind: commonv1.OperationKind_OPERATION_KIND_CREATE,
		Target: &lifecyclev1.RequestOperationRequest_Create{Create: &lifecyclev1.CreateWorkspace{
			Tenant: tenant, Name: "demo", Spec: &lifecyclev1.WorkspaceSpec{Placement: byProcess},
		}},
	})
	if err != nil {
		t.Fatal(err)
	}
	id := res.GetOperation().GetWorkspaceId()
	failed := p.rests(id, "failed")
	made := p.world.standing()
	claims := `SELECT count(*) FROM lifecycle.resource_claim
		WHERE workspace_id = $1 AND released_at IS NULL AND orphaned_at IS NULL`
	held := p.count(claims, id)
	if len(made) < 4 || held < 6 {
		t.Fatalf("after the failed flip there stand %v with %d claims", made, held)
	}
	if n := p.count(`SELECT count(*) FROM lifecycle.saga_step WHERE run_id = $1 AND dir = 'undo'`, failed.RunID); n != 0 {
		t.Fatalf("%d attempts to undo", n)
	}
	if _, err := p.seats[0].ask(t.Context(), kRetry, id); err == nil {
		t.Fatal("a retry without a reset was taken")
	} else {
		want(t, err, commonv1.Reason_REASON_NOT_RESET)
	}
	exec(`DROP TRIGGER no_flip ON lifecycle.allocation`)
	if _, err := p.seats[0].ask(t.Context(), kReset, id); err != nil {
		t.Fatal(err)
	}
	if _, err := p.seats[0].ask(t.Context(), kRetry, id); err != nil {
		t.Fatal(err)
	}
	now := p.rests(id, "active")
	if now.Epoch != failed.Epoch {
		t.Errorf("it came back in epoch %d, not in %d", now.Epoch, failed.Epoch)
	}
	if got := p.world.standing(); len(got) != len(made) {
		t.Errorf("there stood %v, and now %v", made, got)
	}
	if n := p.count(claims, id); n != held {
		t.Errorf("%d claims were held, and now %d", held, n)
	}
	p.world.mu.Lock()
	defer p.world.mu.Unlock()
	for k, n := range p.world.launches {
		if n != 1 {
			t.Errorf("%s was launched %d times", k, n)
		}
	}
	if a, ok, err := allocation.Live(testkit.Context(t), p.seats[0].pool, id); err != nil || !ok ||
		a.State != commonv1.AllocationState_ALLOCATION_STATE_ACTIVE {
		t.Errorf("its hold is %+v, %v", a, err)
	}
}
