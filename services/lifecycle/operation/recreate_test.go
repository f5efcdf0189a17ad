package operation

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/rpc"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/placement"
	"github.com/gpuaas/mesh/services/lifecycle/provision"
	"github.com/gpuaas/mesh/services/lifecycle/reap"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
	"github.com/gpuaas/mesh/services/lifecycle/workspace"
)

const byStatic = commonv1.PlacementDriver_PLACEMENT_DRIVER_STATIC

func (p *cluster) actionOf(id string, kind commonv1.OperationKind) *lifecyclev1.ActionOption {
	p.t.Helper()
	res, err := p.seats[0].server.GetActions(p.t.Context(), &lifecyclev1.GetActionsRequest{WorkspaceId: id})
	if err != nil {
		p.t.Fatal(err)
	}
	for _, a := range res.GetActions() {
		if a.GetKind() == kind {
			return a
		}
	}
	p.t.Fatalf("there is no row for %v", kind)
	return nil
}

// recreated requests a recreation and waits until it has succeeded.
func (p *cluster) recreated(id string) (workspace.Row, *lifecyclev1.Operation) {
	p.t.Helper()
	was := p.workspace(id)
	op, err := p.seats[0].ask(p.t.Context(), kRecreate, id)
	if err != nil {
		p.t.Fatal(err)
	}
	if op.GetEpoch() != was.Epoch+1 || op.GetState() != commonv1.WorkspaceState_WORKSPACE_STATE_RECREATING ||
		op.GetJoined() || op.GetPos() == "" {
		p.t.Fatalf("answered %v", op)
	}
	if now := p.workspace(id); now.Epoch != was.Epoch+1 {
		p.t.Fatalf("the epoch is %d when the operation is answered", now.Epoch)
	}
	return p.rests(id, "active"), op
}

func (p *cluster) never(text string) {
	p.t.Helper()
	if len(p.world.overlaps) > 0 {
		p.t.Errorf("%s: %v", text, p.world.overlaps)
	}
	for k, n := range p.world.launches {
		if n != 1 {
			p.t.Errorf("%s: %s was launched %d times", text, k, n)
		}
	}
}

func TestARecreationEndsTheInstanceAndProvisionsTheNextEpoch(t *testing.T) {
	p := newCluster(t, clusterConfig{seats: 1, lease: 15 * time.Second})
	tenant := p.tenant()
	id := p.create(tenant, "demo", byProcess)
	var made string
	if err := p.db.OwnerPool().QueryRow(t.Context(),
		`SELECT created_at::text FROM lifecycle.workspace_handle WHERE workspace_id = $1`, id).Scan(&made); err != nil {
		t.Fatal(err)
	}
	if a := p.actionOf(id, kRecreate); !a.GetPossible() || !strings.Contains(a.GetConsequence(), "epoch 1") {
		t.Fatalf("the row says %v", a)
	}
	dry, err := p.seats[0].ask(t.Context(), kRecreate, id,
		func(r *lifecyclev1.RequestOperationRequest) { r.DryRun = true })
	if err != nil || !dry.GetDryRun() || p.workspace(id).Epoch != 1 {
		t.Fatalf("%v %v", dry, err)
	}
	w, op := p.recreated(id)
	if w.RunID != op.GetOperationId() || w.NodeID == "" || string(w.Endpoints) == "[]" || w.LastError != "" {
		t.Errorf("afterwards %+v", w)
	}
	p.never("a recreation")
	if got := p.world.standing(); len(got) != 4 || !slices.Contains(got, "box "+id+":2") {
		t.Errorf("there stand %q", got)
	}
	if n := p.count(`SELECT count(*) FROM lifecycle.workspace_handle
		WHERE workspace_id = $1 AND epoch = 2 AND created_at = $2::timestamptz`, id, made); n != 1 {
		t.Error("the handle was not kept for the next epoch")
	}
	if n := p.count(`SELECT count(*) FROM lifecycle.resource_claim
		WHERE workspace_id = $1 AND released_at IS NULL AND epoch <> 2`, id); n != 0 {
		t.Errorf("%d claims of the former epoch are live", n)
	}
	if n := p.count(`SELECT count(*) FROM lifecycle.resource_claim
		WHERE workspace_id = $1 AND kind IN ('handle', 'schema')`, id); n != 2 {
		t.Errorf("%d claims of handle and schema: they were made anew", n)
	}
	if n := p.count(`SELECT count(*) FROM lifecycle.instance WHERE workspace_id = $1 AND state = 'ended' AND epoch = 1`,
		id); n != 1 {
		t.Error("the former box is not recorded ended")
	}
	// Once more; the decommission afterwards then finds everything.
	p.recreated(id)
	if _, err := p.seats[0].ask(t.Context(), kDecommission, id); err != nil {
		t.Fatal(err)
	}
	p.rests(id, "decommissioned")
	if got := p.world.standing(); len(got) != 0 {
		t.Errorf("there stand %q", got)
	}
	_, err = p.seats[0].ask(t.Context(), kRecreate, id)
	want(t, err, commonv1.Reason_REASON_PRECONDITION_FAILED)
}

func TestAFailedWorkspaceIsRecreated(t *testing.T) {
	p := newCluster(t, clusterConfig{seats: 1, lease: 15 * time.Second})
	id := p.create(p.tenant(), "demo", byProcess)
	p.world.mu.Lock()
	p.world.refuse = "workload.deploy"
	p.world.mu.Unlock()
	if _, err := p.seats[0].ask(t.Context(), kRecreate, id); err != nil {
		t.Fatal(err)
	}
	w := p.rests(id, "failed")
	if w.Epoch != 2 || w.LastErrorCode == "" || w.NodeID != "" || string(w.Endpoints) != "[]" {
		t.Errorf("it ended as %+v", w)
	}
	if got := p.world.standing(); len(got) != 0 {
		t.Errorf("a failed recreation is not clean: %q", got)
	}
	if n := p.count(`SELECT count(*) FROM lifecycle.resource_claim
		WHERE workspace_id = $1 AND kind <> 'schema' AND released_at IS NULL`, id); n != 0 {
		t.Errorf("%d claims are live", n)
	}
	p.world.mu.Lock()
	p.world.refuse = ""
	p.world.mu.Unlock()
	if w, _ := p.recreated(id); w.Epoch != 3 {
		t.Errorf("epoch %d", w.Epoch)
	}
	p.never("a failed recreation")
}

func TestACancelledRecreationIsUndone(t *testing.T) {
	p := newCluster(t, clusterConfig{seats: 1, lease: 15 * time.Second})
	id := p.create(p.tenant(), "demo", byProcess)
	p.world.mu.Lock()
	p.world.mute = true // no agent answers, so the run waits in the middle
	p.world.mu.Unlock()
	if _, err := p.seats[0].ask(t.Context(), kRecreate, id); err != nil {
		t.Fatal(err)
	}
	if _, err := p.seats[0].ask(t.Context(), kCancel, id); err != nil {
		t.Fatal(err)
	}
	_, err := p.seats[0].ask(t.Context(), kRecreate, id)
	want(t, err, commonv1.Reason_REASON_OPERATION_IN_PROGRESS)
	p.world.mu.Lock()
	p.world.mute = false
	p.world.mu.Unlock()
	p.rests(id, "failed")
	if got := p.world.standing(); len(got) != 0 {
		t.Errorf("there stand %q", got)
	}
}

// A provider that confirms no end delays a recreation, unless an operator gives an attestation; an instance that may
// still run is left to the sweep.
func TestAnInstanceThatCannotBeConfirmedEnded(t *testing.T) {
	t.Parallel()
	p := newCluster(t, clusterConfig{seats: 1, lease: 15 * time.Second})
	id := p.create(p.tenant(), "demo", byProcess)
	p.world.mu.Lock()
	p.world.endless = true
	p.world.mu.Unlock()
	if _, err := p.seats[0].ask(t.Context(), kRecreate, id); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, testkit.Patience, func() error {
		if n := p.count(`SELECT count(*) FROM lifecycle.saga_step
			WHERE workspace_id = $1 AND name = $2 AND state = 'failed'
			AND error_code = 'unavailable'`, id, provision.StepPrevious); n < 2 {
			return fmt.Errorf("%d attempts have failed", n)
		}
		return nil
	})
	if n := p.count(`SELECT count(*) FROM lifecycle.instance WHERE workspace_id = $1 AND epoch = 2`, id); n != 0 {
		t.Fatal("the next epoch has begun")
	}
	if got := p.world.standing(); !slices.Contains(got, "box "+id+":1") || slices.Contains(got, "box "+id+":2") {
		t.Fatalf("there stand %q", got)
	}
	p.world.mu.Lock()
	p.world.endless = false
	p.world.mu.Unlock()
	p.rests(id, "active")
	p.world.mu.Lock()
	p.world.endless = true
	p.world.mu.Unlock()
	_, err := p.seats[0].ask(operator(t.Context()), kRecreate, id, func(r *lifecyclev1.RequestOperationRequest) {
		r.FencedProof, r.Reason = commonv1.FencedProof_FENCED_PROOF_NETWORK_ISOLATED, "the provider is gone"
	})
	if err != nil {
		t.Fatal(err)
	}
	if w := p.rests(id, "active"); w.Epoch != 3 {
		t.Errorf("epoch %d", w.Epoch)
	}
	if n := p.count(`SELECT count(*) FROM lifecycle.resource_claim
		WHERE workspace_id = $1 AND epoch = 2 AND kind = 'instance' AND orphaned_at IS NOT NULL
		AND released_at IS NULL`, id); n != 1 {
		t.Error("the box that may stand is no orphan claim")
	}
	if n := p.count(`SELECT count(*) FROM lifecycle.resource_claim
		WHERE workspace_id = $1 AND epoch = 2 AND released_at IS NULL AND orphaned_at IS NULL`, id); n != 0 {
		t.Errorf("%d claims of the fenced epoch are live", n)
	}
	owners, err := reap.OwnersOf(t.Context(), p.db.Pool(pg.RoleLifecycle),
		[]placement.Instance{{WorkspaceID: id, Epoch: 2}})
	if err != nil {
		t.Fatal(err)
	}
	if v, why := reap.Belongs(placement.Instance{WorkspaceID: id, Epoch: 2}, owners[0]); v != reap.Orphan {
		t.Errorf("the sweep would leave the fenced box standing: %s %s", v, why)
	}
	p.never("a fenced box")
}

func operator(ctx context.Context) context.Context {
	return rpc.WithPerson(ctx, rpc.Person{Subject: "olga", Roles: []string{"operator"}})
}

func TestOnAMachineStorageAndSlotAreKept(t *testing.T) {
	p := newCluster(t, clusterConfig{seats: 1, lease: 15 * time.Second})
	node := p.machine("m1")
	p.machine("m2")
	id := p.create(p.tenant(), "demo", byStatic)
	where := p.workspace(id).NodeID
	var slot, claim string
	err := p.db.OwnerPool().QueryRow(t.Context(),
		`SELECT a.slot::text, c.id::text FROM lifecycle.allocation a JOIN lifecycle.resource_claim c USING (workspace_id)
		WHERE a.workspace_id = $1 AND c.kind = 'storage'`, id).Scan(&slot, &claim)
	if err != nil {
		t.Fatal(err)
	}
	w, _ := p.recreated(id)
	if w.NodeID != where {
		t.Errorf("it went from %s to %s (m1 is %s)", where, w.NodeID, node)
	}
	if n := p.count(`SELECT count(*) FROM lifecycle.allocation
		WHERE workspace_id = $1 AND state = 'active' AND epoch = 2 AND slot::text = $2`, id, slot); n != 1 {
		t.Error("the slot was not kept")
	}
	if n := p.count(`SELECT count(*) FROM lifecycle.resource_claim WHERE id = $1 AND released_at IS NULL AND epoch = 2`,
		claim); n != 1 {
		t.Error("the storage was not kept")
	}
	if n := p.count(`SELECT count(*) FROM lifecycle.gpu_hold`); n != 1 {
		t.Errorf("%d devices are held", n)
	}
	if n := p.count(`SELECT count(*) FROM lifecycle.task WHERE workspace_id = $1 AND type = 'storage.release'`,
		id); n != 0 {
		t.Error("the storage was released")
	}
}

func TestAMachineThatCannotBeAskedKeepsItsWorkspace(t *testing.T) {
	p := newCluster(t, clusterConfig{seats: 1, lease: 15 * time.Second})
	p.machine("m1")
	id := p.create(p.tenant(), "demo", byStatic)
	was := p.workspace(id)
	p.beat(-time.Hour)
	a := p.actionOf(id, kRecreate)
	if a.GetPossible() || a.GetReason() != commonv1.Reason_REASON_PREVIOUS_EPOCH_ALIVE || len(a.GetUnmet()) != 1 ||
		!strings.Contains(a.GetUnmet()[0], "m1") {
		t.Errorf("the row says %v", a)
	}
	for _, dry := range []bool{true, false} {
		_, err := p.seats[0].ask(t.Context(), kRecreate, id, func(r *lifecyclev1.RequestOperationRequest) { r.DryRun = dry })
		want(t, err, commonv1.Reason_REASON_PREVIOUS_EPOCH_ALIVE)
		if f, _ := fault.As(err); len(f.Unmet) == 0 || f.Remedy == "" {
			t.Errorf("dry run %v: it does not say what would help: %+v", dry, f)
		}
	}
	if now := p.workspace(id); now.Epoch != was.Epoch || now.State != "active" || now.Version != was.Version {
		t.Errorf("a refusal changed %+v to %+v", was, now)
	}
	proof := func(r *lifecyclev1.RequestOperationRequest) {
		r.FencedProof = commonv1.FencedProof_FENCED_PROOF_POWERED_OFF
	}
	reason := func(r *lifecyclev1.RequestOperationRequest) { r.Reason = "the rack is dark" }
	_, err := p.seats[0].ask(t.Context(), kRecreate, id, proof, reason)
	want(t, err, commonv1.Reason_REASON_PERMISSION_DENIED)
	_, err = p.seats[0].ask(rpc.WithPerson(t.Context(), rpc.Person{Subject: "tom", Roles: []string{"tenant"}}), kRecreate,
		id, proof, reason)
	want(t, err, commonv1.Reason_REASON_PERMISSION_DENIED)
	_, err = p.seats[0].ask(operator(t.Context()), kRecreate, id, proof,
		func(r *lifecyclev1.RequestOperationRequest) { r.Reason = " " })
	want(t, err, commonv1.Reason_REASON_REASON_REQUIRED)
	_, err = p.seats[0].ask(operator(t.Context()), kRetry, id, proof, reason)
	want(t, err, commonv1.Reason_REASON_INVALID_ARGUMENT)
	// With the attestation and no other machine, everything would be lost.
	_, err = p.seats[0].ask(operator(t.Context()), kRecreate, id, proof, reason)
	want(t, err, commonv1.Reason_REASON_NO_CAPACITY)
	// The dark machine's agents stay away while another machine comes.
	p.world.mu.Lock()
	dark := p.world.instances["machine:m1"]
	delete(p.world.instances, "machine:m1")
	p.world.replica = ids.New()
	p.world.mu.Unlock()
	p.beat(time.Hour)
	fresh := p.machine("m2")
	op, err := p.seats[0].ask(operator(t.Context()), kRecreate, id, proof, reason)
	if err != nil {
		t.Fatal(err)
	}
	w := p.rests(id, "active")
	if w.NodeID != fresh || w.Epoch != op.GetEpoch() {
		t.Errorf("it went to %s in epoch %d", w.NodeID, w.Epoch)
	}
	if n := p.count(`SELECT count(*) FROM lifecycle.resource_claim
		WHERE workspace_id = $1 AND node_id = $2 AND kind IN ('workload', 'storage')
		AND epoch = 1 AND orphaned_at IS NOT NULL AND released_at IS NULL AND orphaned_by LIKE '%olga%'
			AND orphan_reason LIKE '%powered_off%dark%'`, id, dark.node); n != 2 {
		t.Errorf("%d orphan claims on the dark machine, want the workload and its storage", n)
	}
	if n := p.count(`SELECT count(*) FROM lifecycle.node_gate WHERE node_id = $1 AND cordoned`, dark.node); n != 1 {
		t.Error("the dark machine is not cordoned")
	}
	if n := p.count(`SELECT count(*) FROM lifecycle.static_placement
		WHERE workspace_id = $1 AND epoch = 1 AND ended_at IS NOT NULL
		AND fence_word LIKE '%powered_off%olga%dark%'`, id); n != 1 {
		t.Error("the proof is not on record at the driver")
	}
	if n := p.count(`SELECT count(*) FROM lifecycle.instance
		WHERE workspace_id = $1 AND epoch = 1 AND state = 'ended'
		AND end_reason LIKE 'fenced: powered_off%olga%'`, id); n != 1 {
		t.Error("the proof is not on record with the instance")
	}
	if n := p.count(`SELECT count(*) FROM lifecycle.saga_run
		WHERE id = $1 AND input->'word'->>'fenced_proof' = 'powered_off'`, op.GetOperationId()); n != 1 {
		t.Error("the proof is not on record with the run")
	}
	// The orphans on the dark machine delay nothing on this one.
	if w, _ := p.recreated(id); w.NodeID != fresh {
		t.Errorf("it went on to %s", w.NodeID)
	}
	if _, err := p.seats[0].ask(t.Context(), kDecommission, id); err != nil {
		t.Fatal(err)
	}
	p.rests(id, "decommissioned")
	if n := p.count(`SELECT count(*) FROM lifecycle.allocation WHERE workspace_id = $1 AND state <> 'released'`,
		id); n != 0 {
		t.Error("its end holds a slot because of what an earlier epoch left elsewhere")
	}
}

// The step waits for a machine that goes away between the request and the step, and nothing of the next epoch begins.
func TestAMachineThatGoesAwayIsWaitedFor(t *testing.T) {
	p := newCluster(t, clusterConfig{seats: 1, lease: 15 * time.Second})
	p.machine("m1")
	id := p.create(p.tenant(), "demo", byStatic)
	p.world.mu.Lock()
	p.world.mute = true
	p.world.mu.Unlock()
	if _, err := p.seats[0].ask(t.Context(), kRecreate, id); err != nil {
		t.Fatal(err)
	}
	p.beat(-time.Hour)
	testkit.Eventually(t, testkit.Patience, func() error {
		run, _, err := runs.Live(t.Context(), p.db.Pool(pg.RoleLifecycle), id)
		if err != nil || !strings.Contains(run.WhyWaiting, "does not answer") {
			return fmt.Errorf("it waits for %q: %w", run.WhyWaiting, err)
		}
		return nil
	})
	if n := p.count(`SELECT count(*) FROM lifecycle.instance WHERE workspace_id = $1 AND epoch = 2`, id); n != 0 {
		t.Error("the next epoch has begun")
	}
	p.world.mu.Lock()
	p.world.mute = false
	p.world.mu.Unlock()
	p.beat(time.Hour)
	p.rests(id, "active")
}

// A recreation that was decided about one epoch does not replace the next one; while an operation that serves it is
// open, it joins that.
func TestARecreationOfAnotherEpochIsRefused(t *testing.T) {
	p := newCluster(t, clusterConfig{seats: 1, lease: 15 * time.Second})
	id := p.create(p.tenant(), "demo", byProcess)
	ask := func(kind commonv1.OperationKind, epoch int64, dry bool, key string) (*lifecyclev1.Operation, error) {
		return p.seats[0].ask(t.Context(), kind, id, func(r *lifecyclev1.RequestOperationRequest) {
			r.ExpectedEpoch, r.DryRun, r.IdempotencyKey = epoch, dry, key
		})
	}
	if _, err := ask(kRecreate, 1, true, ""); err != nil {
		t.Fatal(err)
	}
	p.recreated(id) // another caller is quicker
	was := p.workspace(id)
	for _, dry := range []bool{true, false} {
		_, err := ask(kRecreate, 1, dry, "one")
		want(t, err, commonv1.Reason_REASON_CONFLICT)
		f, _ := fault.As(err)
		if f.Remedy == "" || !strings.Contains(f.Public, "epoch 1") || !strings.Contains(f.Public, "epoch 2") {
			t.Errorf("dry run %v: %+v", dry, f)
		}
	}
	if now := p.workspace(id); now.Version != was.Version || now.RunID != was.RunID {
		t.Errorf("a refusal changed %+v to %+v", was, now)
	}
	_, err := ask(kDecommission, 2, false, "")
	want(t, err, commonv1.Reason_REASON_INVALID_ARGUMENT)
	p.world.mu.Lock()
	p.world.mute = true // no agent answers, so the run waits in the middle
	p.world.mu.Unlock()
	op, err := ask(kRecreate, 2, false, "one") // the refusal did not use the key up
	if err != nil || op.GetJoined() || op.GetEpoch() != 3 {
		t.Fatalf("%v %v", op, err)
	}
	again, err := ask(kRecreate, 1, false, "one")
	if err != nil || again.GetOperationId() != op.GetOperationId() {
		t.Errorf("the same key was answered %v %v", again, err)
	}
	for _, key := range []string{"", "two"} {
		for _, dry := range []bool{true, false} {
			joins, err := ask(kRecreate, 2, dry, key)
			if err != nil || !joins.GetJoined() || joins.GetOperationId() != op.GetOperationId() {
				t.Errorf("key %q, dry run %v: %v %v", key, dry, joins, err)
			}
		}
	}
	p.world.mu.Lock()
	p.world.mute = false
	p.world.mu.Unlock()
	p.rests(id, "active")
	_, err = ask(kRecreate, 2, false, "three")
	want(t, err, commonv1.Reason_REASON_CONFLICT)
}

// The epoch is compared where the run begins: of many callers who decided about one epoch, and whose requests come when
// it is over, none replaces the next.
func TestTheEpochIsComparedWhereTheRunBegins(t *testing.T) {
	p := newCluster(t, clusterConfig{seats: 1, lease: 15 * time.Second})
	id := p.create(p.tenant(), "demo", byProcess)
	err := pg.InTx(t.Context(), p.db.Pool(pg.RoleLifecycle), func(ctx context.Context, tx pgx.Tx) error {
		stale := p.workspace(id)
		stale.Epoch = 7 // as it was read before the others were done
		_, err := p.seats[0].server.recreate(ctx, tx, stale, &lifecyclev1.RequestOperationRequest{
			Kind: kRecreate, Target: &lifecyclev1.RequestOperationRequest_WorkspaceId{WorkspaceId: id}, ExpectedEpoch: 7,
		}, ids.New(), "watchdog")
		return err
	})
	want(t, err, commonv1.Reason_REASON_CONFLICT)
	if w := p.workspace(id); w.Epoch != 1 || w.State != "active" {
		t.Errorf("it is %+v", w)
	}
}
