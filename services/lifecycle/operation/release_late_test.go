package operation

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/reap"
	"github.com/gpuaas/mesh/services/lifecycle/schema"
)

// occupy holds the lock of a workspace's schema in the workload database, as a session that hangs would, until the
// returned function is called.
func (p *cluster) occupy(workspaceID string) func() {
	p.t.Helper()
	w := p.workspace(workspaceID)
	conn, err := pgx.Connect(p.t.Context(), p.db.WorkloadURL())
	if err != nil {
		p.t.Fatal(err)
	}
	if _, err := conn.Exec(p.t.Context(), `SELECT pg_advisory_lock(hashtextextended($1, 0))`,
		schema.Name(w.Tenant, w.Name, w.ID)); err != nil {
		p.t.Fatal(err)
	}
	closed := false
	free := func() {
		if !closed {
			closed = true
			_ = conn.Close(context.WithoutCancel(p.t.Context()))
		}
	}
	p.t.Cleanup(free)
	return free
}

func (p *cluster) machineReaper() *reap.MachineReaper {
	return reap.NewMachineReaper(reap.MachineReaperDeps{
		Logger: testkit.Logger(p.t), DB: p.db.Pool(pg.RoleLifecycle),
		Tasks: p.world.tasks, Committed: func() {},
	})
}

func (p *cluster) cordoned(node string) bool {
	p.t.Helper()
	return p.count(`SELECT count(*) FROM lifecycle.node_gate WHERE node_id = $1 AND cordoned`, node) == 1
}

// A release ends at its deadline whatever it hangs on: here a database that does not answer. A forced one does not wait
// for it either.
func TestAReleaseThatHangsIsGivenUpInTime(t *testing.T) {
	p := newCluster(t, clusterConfig{seats: 1, lease: 15 * time.Second, release: time.Second})
	node := p.machine("m1")
	id := p.create(p.tenant(), "demo", byStatic)
	free := p.occupy(id)
	if _, err := p.seats[0].ask(t.Context(), kDecommission, id); err != nil {
		t.Fatal(err)
	}
	p.rests(id, "stuck") // while it still hangs
	a := p.newest(id)
	if a.State != commonv1.AllocationState_ALLOCATION_STATE_RELEASE_FAILED || !strings.Contains(a.LastError, "deadline") ||
		!p.cordoned(node) {
		t.Fatalf("its hold is %+v, the machine cordoned: %v", a, p.cordoned(node))
	}
	if a.Fence != 4 { // allocating, active, releasing, release_failed
		t.Errorf("its fence is %d", a.Fence)
	}
	var acks []string
	dry := &lifecyclev1.ForceReleaseRequest{
		AllocationId: a.ID, ExpectedFence: a.Fence, FencedProof: commonv1.FencedProof_FENCED_PROOF_OPERATOR_ASSERTS,
		Reason: "the database is lost", DryRun: true,
	}
	allocations := NewAllocations(p.seats[0].server)
	res, err := allocations.ForceRelease(operator(t.Context()), dry)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range res.GetClaims() {
		acks = append(acks, c.GetClaimId())
	}
	dry.DryRun, dry.AckOrphans = false, acks
	if _, err := allocations.ForceRelease(operator(t.Context()), dry); err != nil {
		t.Fatal(err)
	}
	p.rests(id, "decommissioned")
	if now := p.newest(id); now.State != commonv1.AllocationState_ALLOCATION_STATE_RELEASED || now.Orphans == 0 {
		t.Errorf("its hold is %+v", now)
	}
	if n := p.count(`SELECT count(*) FROM lifecycle.resource_claim
		WHERE workspace_id = $1 AND kind = 'schema' AND orphaned_at IS NOT NULL
		AND orphan_reason LIKE '%operator_asserts%lost%'`, id); n != 1 {
		t.Errorf("%d schemas were given up", n)
	}
	// The machine answers: the release itself or the sweep has removed everything there that could keep other workspaces
	// from it.
	testkit.Eventually(t, testkit.Patience, func() error {
		if _, err := p.machineReaper().Sweep(t.Context()); err != nil {
			return err
		}
		if err := p.placeable(); err != nil || p.cordoned(node) {
			return fmt.Errorf("the machine is cordoned: %v, placeable: %w", p.cordoned(node), err)
		}
		return nil
	})
	if got := p.world.standing(); len(got) != 1 {
		t.Errorf("left standing: %v", got)
	}
	free()
}

// A release that no driver drives is late as well.
func TestAReleaseWithoutADriverIsFoundLate(t *testing.T) {
	p := newCluster(t, clusterConfig{seats: 1, lease: 15 * time.Second})
	node := p.machine("m1")
	id := p.create(p.tenant(), "demo", byStatic)
	releasing := func(since string) {
		_, err := p.db.OwnerPool().Exec(t.Context(),
			`UPDATE lifecycle.allocation SET state = 'releasing', occupancy = 'cleanup', version = version + 1,
			release_deadline_at = mesh.clock() - $2::interval WHERE workspace_id = $1`, id, since)
		if err != nil {
			t.Fatal(err)
		}
	}
	releasing("1 second")
	if _, err := p.machineReaper().Sweep(t.Context()); err != nil {
		t.Fatal(err)
	}
	if a := p.newest(id); a.State != commonv1.AllocationState_ALLOCATION_STATE_RELEASING {
		t.Fatalf("its own run was not given the time to say so: %+v", a)
	}
	releasing("1 minute")
	if _, err := p.machineReaper().Sweep(t.Context()); err != nil {
		t.Fatal(err)
	}
	a := p.newest(id)
	if a.State != commonv1.AllocationState_ALLOCATION_STATE_RELEASE_FAILED ||
		!strings.Contains(a.LastError, "no operation is open") || !p.cordoned(node) {
		t.Fatalf("its hold is %+v, the machine cordoned: %v", a, p.cordoned(node))
	}
	if _, err := NewAllocations(p.seats[0].server).RetryRelease(operator(t.Context()),
		&lifecyclev1.RetryReleaseRequest{AllocationId: a.ID}); err != nil {
		t.Fatal(err)
	}
	p.rests(id, "failed") // the workspace was to stay: a retry or a recreation brings it back
	if now := p.newest(id); now.State != commonv1.AllocationState_ALLOCATION_STATE_RELEASED || p.cordoned(node) {
		t.Errorf("its hold is %+v, the machine cordoned: %v", now, p.cordoned(node))
	}
}

// A resource that a later epoch has on the machine is never removed because of an earlier epoch's orphan.
func TestAnOrphanIsReapedByItsEpoch(t *testing.T) {
	p := newCluster(t, clusterConfig{seats: 1, lease: 15 * time.Second})
	node := p.machine("m1")
	id := p.create(p.tenant(), "demo", byStatic)
	standing := fmt.Sprint(p.world.standing())
	tasks := p.count(`SELECT count(*) FROM lifecycle.task`)
	orphan := func(name string) string {
		claim := ids.New()
		_, err := p.db.OwnerPool().Exec(t.Context(), `
			INSERT INTO lifecycle.resource_claim (id, workspace_id, tenant_id, run_id, step, kind, scope, deterministic_name,
				epoch, node_id, orphaned_at, orphaned_by, orphan_reason)
			SELECT $2, id, tenant_id, run_id, 1, 'workload', 'node_local', $3, epoch - 1, $4, mesh.clock(), 'olga', 'lost'
				FROM lifecycle.workspace WHERE id = $1`, id, claim, name, node)
		if err != nil {
			t.Fatal(err)
		}
		return claim
	}
	reaped := func(claim string) string {
		var why string
		err := p.db.OwnerPool().QueryRow(testkit.Context(t),
			`SELECT CASE WHEN released_at IS NULL THEN '' ELSE orphan_reason END FROM lifecycle.resource_claim WHERE id = $1`,
			claim).Scan(&why)
		if err != nil {
			t.Fatal(err)
		}
		return why
	}
	same, gone := orphan("demo"), orphan("former")
	p.world.mu.Lock()
	p.world.instances["machine:m1"].things = append(p.world.instances["machine:m1"].things, "workload former")
	p.world.mu.Unlock()
	testkit.Eventually(t, testkit.Patience, func() error {
		if _, err := p.machineReaper().Sweep(t.Context()); err != nil {
			return err
		}
		if reaped(same) == "" || reaped(gone) == "" {
			return fmt.Errorf("not reaped: %q %q", reaped(same), reaped(gone))
		}
		return nil
	})
	if got := reaped(same); got != "lost; reaped: a later epoch has taken its place" {
		t.Errorf("of the one that was replaced it says %q", got)
	}
	if got := reaped(gone); got != "lost; reaped: the agent has removed it" {
		t.Errorf("of the one that was left it says %q", got)
	}
	if now := fmt.Sprint(p.world.standing()); now != standing {
		t.Errorf("there stood %s, and now %s", standing, now)
	}
	if n := p.count(`SELECT count(*) FROM lifecycle.task WHERE type <> 'workload.status'`) - tasks; n > 1 {
		t.Errorf("%d tasks were asked of the agent for one orphan", n)
	}
}
