package operation

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/allocation"
	"github.com/gpuaas/mesh/services/lifecycle/reap"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
)

// away disconnects the machines' agents, or lets them answer again.
func (p *cluster) away(gone bool) {
	p.world.mu.Lock()
	p.world.mute = gone
	p.world.mu.Unlock()
	if gone {
		p.beat(-time.Hour)
	} else {
		p.beat(time.Hour)
	}
}

var newestAllocation = pg.Define(pg.RoleLifecycle, "operation.test_newest_allocation",
	`SELECT `+allocation.Columns+` FROM lifecycle.allocation a WHERE a.workspace_id = $1 ORDER BY a.created_at DESC
		LIMIT 1`)

func (p *cluster) newest(workspaceID string) allocation.Allocation {
	p.t.Helper()
	a, err := allocation.One(testkit.Context(p.t), p.db.Pool(pg.RoleLifecycle), newestAllocation, workspaceID)
	if err != nil {
		p.t.Fatal(err)
	}
	return a
}

// failedRelease decommissions a workspace on a machine that does not answer, until its release has failed.
func (p *cluster) failedRelease() (id, node string, a allocation.Allocation) {
	p.t.Helper()
	node = p.machine("m1")
	id = p.create(p.tenant(), "demo", byStatic)
	p.away(true)
	if _, err := p.seats[0].ask(p.t.Context(), kDecommission, id); err != nil {
		p.t.Fatal(err)
	}
	p.rests(id, "stuck")
	a = p.newest(id)
	if a.State != commonv1.AllocationState_ALLOCATION_STATE_RELEASE_FAILED || a.Occupancy != "cleanup" ||
		a.LastError == "" {
		p.t.Fatalf("its hold is %+v", a)
	}
	if p.count(`SELECT count(*) FROM lifecycle.node_gate WHERE node_id = $1 AND cordoned AND cordoned_by = $2`, node,
		allocation.CordonOwner) != 1 {
		p.t.Error("the machine is not cordoned by the release")
	}
	return id, node, a
}

func (p *cluster) placeable() error {
	return pg.InTx(p.t.Context(), p.db.Pool(pg.RoleLifecycle), func(ctx context.Context, tx pgx.Tx) error {
		_, _, err := allocation.TakeSlot(ctx, tx, 0)
		return err
	})
}

// Scenario: release-failed-stuck.
func TestAReleaseThatFailsIsSeenAndTriedAgain(t *testing.T) {
	p := newCluster(t, clusterConfig{seats: 1, lease: 15 * time.Second, release: time.Second})
	id, node, a := p.failedRelease()
	for _, kind := range []commonv1.OperationKind{kRetryRelease, kForceRelease} {
		if o := p.actionOf(id, kind); !o.GetPossible() || o.GetConsequence() == "" {
			t.Errorf("the row says %v", o)
		}
		_, err := p.seats[0].ask(operator(t.Context()), kind, id)
		want(t, err, commonv1.Reason_REASON_INVALID_ARGUMENT)
	}
	p.away(false)
	// Removing the cordon does not make the machine placeable.
	if _, err := p.db.Pool(pg.RoleLifecycle).Exec(t.Context(),
		`UPDATE lifecycle.node_gate SET cordoned = false WHERE node_id = $1`, node); err != nil {
		t.Fatal(err)
	}
	if p.placeable() == nil {
		t.Error("the machine is placeable though a release on it has failed")
	}
	allocations := NewAllocations(p.seats[0].server)
	res, err := allocations.RetryRelease(operator(t.Context()),
		&lifecyclev1.RetryReleaseRequest{AllocationId: a.ID, Reason: "it is back"})
	if err != nil || res.GetOperation().GetOperationId() == "" {
		t.Fatalf("%v %v", res, err)
	}
	// On a busy machine a second may be too short again: that is reported, and the release is tried again.
	testkit.Eventually(t, testkit.Patience, func() error {
		w := p.workspace(id)
		if w.State == "stuck" {
			_, err := allocations.RetryRelease(operator(t.Context()), &lifecyclev1.RetryReleaseRequest{AllocationId: a.ID})
			return fmt.Errorf("it was late again: %w", err)
		}
		if w.State != "decommissioned" {
			return fmt.Errorf("the workspace is %s", w.State)
		}
		return nil
	})
	if a := p.newest(id); a.State != commonv1.AllocationState_ALLOCATION_STATE_RELEASED || a.Occupancy != "none" {
		t.Errorf("its hold is %+v", a)
	}
	if got := p.world.standing(); len(got) != 1 { // the machine itself
		t.Errorf("left standing: %v", got)
	}
	if err := p.placeable(); err != nil {
		t.Errorf("the machine is not placeable again: %v", err)
	}
	_, err = allocations.RetryRelease(operator(t.Context()), &lifecyclev1.RetryReleaseRequest{AllocationId: a.ID})
	want(t, err, commonv1.Reason_REASON_PRECONDITION_FAILED)
}

// TestARetryCleansWhatWasSkipped: an operator skips two steps of a decommission, which is then stuck at the step that
// gives the slot back. A retry of the release removes the workload and the schema that were given up, too.
func TestARetryCleansWhatWasSkipped(t *testing.T) {
	t.Parallel()
	p := newCluster(t, clusterConfig{seats: 1, lease: 15 * time.Second, release: time.Second})
	node := p.machine("m1")
	id := p.create(p.tenant(), "demo", byStatic)
	free := p.occupy(id)
	p.away(true)
	if _, err := p.seats[0].ask(t.Context(), kDecommission, id); err != nil {
		t.Fatal(err)
	}
	for _, step := range []string{"Remove tenant workloads", "Drop per-tenant schema", "Release storage and box"} {
		p.stuckAt(id, step)
		if step == "Release storage and box" {
			break
		}
		if _, err := p.seats[0].ask(operator(t.Context()), kSkipUndo, id); err != nil {
			t.Fatal(err)
		}
	}
	a := p.newest(id)
	if a.State != commonv1.AllocationState_ALLOCATION_STATE_RELEASE_FAILED || a.Orphans != 2 {
		t.Fatalf("its hold is %+v", a)
	}
	free()
	p.away(false)
	allocations := NewAllocations(p.seats[0].server)
	retry := &lifecyclev1.RetryReleaseRequest{AllocationId: a.ID, Reason: "it is back"}
	if _, err := allocations.RetryRelease(operator(t.Context()), retry); err != nil {
		t.Fatal(err)
	}
	// On a busy machine a second may be too short again.
	testkit.Eventually(t, testkit.Patience, func() error {
		w := p.workspace(id)
		if w.State == "stuck" {
			_, err := allocations.RetryRelease(operator(t.Context()), retry)
			return fmt.Errorf("it was late again: %s: %w", w.LastError, err)
		}
		if w.State != "decommissioned" {
			return fmt.Errorf("the workspace is %s", w.State)
		}
		return nil
	})
	if n := p.count(`SELECT count(*) FROM lifecycle.resource_claim WHERE workspace_id = $1 AND released_at IS NULL`,
		id); n != 0 {
		t.Errorf("%d claims are left", n)
	}
	if got := p.world.standing(); len(got) != 1 || p.cordoned(node) { // the machine itself
		t.Errorf("left standing: %v, the machine cordoned: %v", got, p.cordoned(node))
	}
}

// stuckAt waits until the workspace's run is stuck at a step.
func (p *cluster) stuckAt(id, step string) {
	p.t.Helper()
	testkit.Eventually(p.t, testkit.Patience, func() error {
		run, _, err := runs.Live(testkit.Context(p.t), p.db.Pool(pg.RoleLifecycle), id)
		if err == nil && (run.State != "stuck" || run.StepName() != step) {
			err = fmt.Errorf("it is %s at %q: %s", run.State, run.StepName(), run.WhyWaiting)
		}
		return err
	})
}

func TestAReleaseIsForcedOnAnAttestation(t *testing.T) {
	t.Parallel()
	p := newCluster(t, clusterConfig{seats: 1, lease: 15 * time.Second, release: time.Second})
	id, node, a := p.failedRelease()
	allocations := NewAllocations(p.seats[0].server)
	req := func(change ...func(*lifecyclev1.ForceReleaseRequest)) *lifecyclev1.ForceReleaseRequest {
		r := &lifecyclev1.ForceReleaseRequest{
			AllocationId: a.ID, ExpectedFence: a.Fence, FencedProof: commonv1.FencedProof_FENCED_PROOF_POWERED_OFF,
			Reason: "the rack is dark",
		}
		for _, c := range change {
			c(r)
		}
		return r
	}
	dry, err := allocations.ForceRelease(operator(t.Context()),
		req(func(r *lifecyclev1.ForceReleaseRequest) { r.DryRun = true }))
	if err != nil || len(dry.GetClaims()) == 0 {
		t.Fatalf("%v %v", dry, err)
	}
	var acks []string
	for _, c := range dry.GetClaims() {
		acks = append(acks, c.GetClaimId())
	}
	for _, tc := range []struct {
		name   string
		change func(*lifecyclev1.ForceReleaseRequest)
		reason commonv1.Reason
		unmet  int
	}{
		{"another fence", func(r *lifecyclev1.ForceReleaseRequest) { r.ExpectedFence++ }, commonv1.Reason_REASON_CONFLICT, 1},
		{
			"nothing acknowledged", func(*lifecyclev1.ForceReleaseRequest) {}, commonv1.Reason_REASON_PRECONDITION_FAILED,
			len(acks),
		},
		{
			"one not acknowledged", func(r *lifecyclev1.ForceReleaseRequest) { r.AckOrphans = acks[1:] },
			commonv1.Reason_REASON_PRECONDITION_FAILED, 1,
		},
		{"a claim of somebody else", func(r *lifecyclev1.ForceReleaseRequest) {
			r.AckOrphans = append([]string{ids.New()}, acks...)
		}, commonv1.Reason_REASON_INVALID_ARGUMENT, 0},
		{
			"no such allocation", func(r *lifecyclev1.ForceReleaseRequest) { r.AllocationId = ids.New() },
			commonv1.Reason_REASON_NOT_FOUND, 0,
		},
	} {
		_, err := allocations.ForceRelease(operator(t.Context()), req(tc.change))
		want(t, err, tc.reason)
		if f, _ := fault.As(err); len(f.Unmet) != tc.unmet {
			t.Errorf("%s: unmet are %q", tc.name, f.Unmet)
		}
	}
	if now := p.newest(id); now.Version != a.Version || p.workspace(id).State != "stuck" {
		t.Fatalf("a refusal changed %+v to %+v", a, now)
	}
	res, err := allocations.ForceRelease(operator(t.Context()),
		req(func(r *lifecyclev1.ForceReleaseRequest) { r.AckOrphans = acks }))
	if err != nil || res.GetOperation().GetKind() != kForceRelease {
		t.Fatalf("%v %v", res, err)
	}
	p.rests(id, "decommissioned")
	left := func() int {
		return p.count(`SELECT count(*) FROM lifecycle.resource_claim
			WHERE workspace_id = $1 AND orphaned_at IS NOT NULL AND released_at IS NULL`, id)
	}
	if now := p.newest(id); now.State != commonv1.AllocationState_ALLOCATION_STATE_RELEASED || len(now.Devices) != 0 ||
		int(now.Orphans) != left() {
		t.Errorf("its hold is %+v", now)
	}
	announced := func() int {
		list := testkit.Events(t, p.db.Pool(pg.RoleLifecycle), `kind = 'allocation.changed' AND aggregate_id = $1`, a.ID)
		if len(list) == 0 {
			t.Fatal("no event of the allocation")
		}
		var now lifecyclev1.Allocation
		if err := list[len(list)-1].Decode(&now); err != nil {
			t.Fatal(err)
		}
		return int(now.GetOrphans())
	}
	if n := announced(); n < 2 || n != left() {
		t.Errorf("the log tells of %d orphans, there are %d", n, left())
	}
	orphans := func() int {
		return p.count(`SELECT count(*) FROM lifecycle.resource_claim
			WHERE workspace_id = $1 AND orphaned_at IS NOT NULL AND released_at IS NULL
			AND kind IN ('workload', 'storage') AND orphaned_by LIKE '%olga%' AND orphan_reason LIKE '%powered_off%dark%'`, id)
	}
	if n := orphans(); n != 2 {
		t.Errorf("%d orphans, want the workload and its storage", n)
	}
	// The machine returns: the orphans there are reaped, and only then does it take workspaces again.
	p.away(false)
	if p.placeable() == nil {
		t.Error("the machine is placeable before its orphans are reaped")
	}
	reaper := reap.NewMachineReaper(reap.MachineReaperDeps{
		Logger: testkit.Logger(t), DB: p.db.Pool(pg.RoleLifecycle), Tasks: p.world.tasks, Committed: func() {},
	})
	testkit.Eventually(t, testkit.Patience, func() error {
		if _, err := reaper.Sweep(t.Context()); err != nil {
			return err
		}
		if n := orphans(); n != 0 {
			return fmt.Errorf("%d orphans are left; standing: %v", n, p.world.standing())
		}
		return nil
	})
	if n := announced(); n != left() {
		t.Errorf("the log tells of %d orphans after they were reaped, there are %d", n, left())
	}
	if got := p.world.standing(); len(got) != 1 {
		t.Errorf("left standing: %v", got)
	}
	if p.count(`SELECT count(*) FROM lifecycle.node_gate WHERE node_id = $1 AND cordoned`, node) != 0 {
		t.Error("the machine stays cordoned")
	}
	if err := p.placeable(); err != nil {
		t.Errorf("the machine is not placeable again: %v", err)
	}
	// The workspace may come back: nothing of the former epoch prevents it.
	if _, open, err := runs.Live(t.Context(), p.db.Pool(pg.RoleLifecycle), id); err != nil || open {
		t.Errorf("an operation is open: %v", err)
	}
}

// A decommission whose last undo was skipped has given everything up and still has the allocation: the forced release
// frees it, though there is nothing left to clean.
func TestAForcedReleaseFreesWhatWasGivenUpBefore(t *testing.T) {
	t.Parallel()
	p := newCluster(t, clusterConfig{seats: 1, lease: 15 * time.Second, release: time.Second})
	id, node, _ := p.failedRelease()
	testkit.Eventually(t, testkit.Patience, func() error {
		switch w := p.workspace(id); w.State {
		case "decommissioned":
			return nil
		case "stuck":
			if _, err := p.seats[0].ask(operator(t.Context()), kSkipUndo, id); err != nil {
				return err
			}
			return errors.New("its undo was skipped")
		default:
			return fmt.Errorf("it is %s", w.State)
		}
	})
	a := p.newest(id)
	if a.State != commonv1.AllocationState_ALLOCATION_STATE_RELEASE_FAILED {
		t.Fatalf("its hold is %+v", a)
	}
	res, err := NewAllocations(p.seats[0].server).ForceRelease(operator(t.Context()), &lifecyclev1.ForceReleaseRequest{
		AllocationId: a.ID, ExpectedFence: a.Fence, FencedProof: commonv1.FencedProof_FENCED_PROOF_POWERED_OFF,
		Reason: "the rack is dark",
	})
	if err != nil {
		t.Fatalf("%v %v", res, err)
	}
	testkit.Eventually(t, testkit.Patience, func() error {
		_, open, err := runs.Live(t.Context(), p.db.Pool(pg.RoleLifecycle), id)
		if open {
			err = errors.New("the release is open")
		}
		return err
	})
	now := p.newest(id)
	if now.State != commonv1.AllocationState_ALLOCATION_STATE_RELEASED || len(now.Devices) != 0 || now.Orphans == 0 {
		t.Errorf("its hold is %+v", now)
	}
	if p.count(`SELECT count(*) FROM lifecycle.node_gate WHERE node_id = $1 AND cordoned AND cordoned_by = $2`, node,
		allocation.CordonOwner) != 1 {
		t.Error("the machine is not cordoned, and orphans are left there")
	}
}
