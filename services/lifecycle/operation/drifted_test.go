package operation

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"google.golang.org/protobuf/proto"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/gate"
	"github.com/gpuaas/mesh/services/lifecycle/provision"
)

// applyVerdict applies the version of a node's verdict that its host is not as it was accepted, or that it is again.
func (p *cluster) applyVerdict(nodeID string, version int64, drifted bool) {
	p.t.Helper()
	const drift = commonv1.DriftReason_DRIFT_REASON_HOST_RUNTIME_DRIFT
	verdict := &recoveryv1.NodeVerdict{NodeId: nodeID, Version: version, Ended: &recoveryv1.VerdictPeriod{Reason: drift}}
	if drifted {
		verdict = &recoveryv1.NodeVerdict{
			NodeId: nodeID, Version: version, Reason: drift,
			Evidence: []*recoveryv1.Evidence{{NodeId: nodeID, Reason: drift, Detail: "kernel is 2, accepted is 1"}},
		}
	}
	body, err := proto.Marshal(verdict)
	if err != nil {
		p.t.Fatal(err)
	}
	record := events.Record{
		Kind: "verdict.changed", Source: pg.RoleRecovery, AggregateType: "verdict", AggregateID: nodeID,
		AggregateVersion: version, Body: body, BodyType: string(verdict.ProtoReflect().Descriptor().FullName()),
	}
	cordons := gate.Cordons{Logger: testkit.Logger(p.t), Policy: policy.Fixed{Set: policy.Defaults()}}
	if err := pg.InTx(p.t.Context(), p.db.Pool(pg.RoleLifecycle), func(ctx context.Context, tx pgx.Tx) error {
		return cordons.OnVerdicts(ctx, tx, []events.Record{record})
	}); err != nil {
		p.t.Fatal(err)
	}
}

const ofDrift = "cordoned by verdict:host_runtime_drift: the host is not as it was accepted: kernel is 2, accepted is 1"

// A workspace on a machine whose host is not as it was accepted is not recreated there, and can be ended. One with an
// instance of its own is recreated: the next instance is another one.
func TestOnADriftedHostAWorkspaceIsNotRecreated(t *testing.T) {
	p := newCluster(t, clusterConfig{seats: 1, lease: 15 * time.Second})
	node := p.machine("m1")
	tenant := p.tenant()
	id, own := p.create(tenant, "demo", byStatic), p.create(tenant, "own", byProcess)
	was := p.workspace(id)
	p.applyVerdict(node, 1, true)
	p.applyVerdict(p.workspace(own).NodeID, 1, true)
	a := p.actionOf(id, kRecreate)
	if a.GetPossible() || a.GetReason() != commonv1.Reason_REASON_HOST_RUNTIME_DRIFT || len(a.GetUnmet()) != 1 ||
		a.GetUnmet()[0] != "machine m1 is "+ofDrift+"; nothing is started on it until that ends" {
		t.Errorf("the row says %v", a)
	}
	for _, dry := range []bool{true, false} {
		_, err := p.seats[0].ask(t.Context(), kRecreate, id, func(r *lifecyclev1.RequestOperationRequest) { r.DryRun = dry })
		want(t, err, commonv1.Reason_REASON_HOST_RUNTIME_DRIFT)
		if f, _ := fault.As(err); len(f.Unmet) == 0 || !dry && f.ConflictingID != node {
			t.Errorf("dry run %v: %+v", dry, f)
		}
	}
	if now := p.workspace(id); now.Epoch != was.Epoch || now.State != "active" || now.Version != was.Version {
		t.Errorf("a refusal changed %+v to %+v", was, now)
	}
	p.recreated(own)
	if a := p.actionOf(id, kDecommission); !a.GetPossible() {
		t.Errorf("the row says %v", a)
	}
	p.applyVerdict(node, 2, false)
	p.recreated(id)
	p.applyVerdict(node, 3, true)
	if _, err := p.seats[0].ask(t.Context(), kDecommission, id); err != nil {
		t.Fatal(err)
	}
	p.rests(id, "decommissioned")
}

// A recreation that has begun when the host is found to differ ends the former epoch, starts nothing of the next and
// shows why it waits, though its task expires in the queue meanwhile. It goes on once the verdict has ended.
func TestOnADriftedHostARecreationWaits(t *testing.T) {
	p := newCluster(t, clusterConfig{seats: 1, lease: time.Hour})
	node := p.machine("m1")
	id := p.create(p.tenant(), "demo", byStatic)
	p.mutes(true)
	op, err := p.seats[0].ask(t.Context(), kRecreate, id)
	if err != nil {
		t.Fatal(err)
	}
	p.parked(op.GetOperationId(), provision.StepPrevious, "waiting for the agent to remove")
	p.applyVerdict(node, 1, true)
	p.mutes(false)
	p.parked(op.GetOperationId(), provision.StepStorage, "; the node is "+ofDrift)
	if n := p.count(`SELECT count(*) FROM lifecycle.task WHERE workspace_id = $1 AND epoch = 2 AND state <> 'queued'
		AND type IN ('storage.allocate', 'workload.deploy')`, id); n != 0 {
		t.Errorf("%d tasks of the next epoch were handed out", n)
	}
	p.change(`UPDATE lifecycle.task SET state = 'expired', state_at = mesh.clock()
		WHERE workspace_id = $1 AND state = 'queued'`, id)
	p.wake(id)
	p.parked(op.GetOperationId(), provision.StepStorage, "; the node is "+ofDrift)
	p.applyVerdict(node, 2, false)
	p.rests(id, "active")
}

// A deploy that is tried again when the host was found to differ waits as well. While the node is not cordoned a wait
// does not read why a task is kept from it.
func TestOnADriftedHostADeployWaits(t *testing.T) {
	var sent testkit.Statements
	p := newCluster(t, clusterConfig{seats: 1, lease: time.Hour, tracer: &sent})
	node := p.machine("m1")
	refuse := func(kind string) {
		p.world.mu.Lock()
		defer p.world.mu.Unlock()
		p.world.refuse = kind
	}
	refuse("workload.deploy")
	id, run := p.begun(byStatic)
	testkit.Eventually(t, testkit.Patience, func() error {
		if p.count(`SELECT count(*) FROM lifecycle.task WHERE workspace_id = $1 AND state = 'failed'`, id) == 0 {
			return errors.New("no deploy was refused yet")
		}
		return nil
	})
	const read = "gate.diagnosis_only"
	if n := sent.Calls(read); n != 0 {
		t.Errorf("%s was sent %d times while the node was not cordoned", read, n)
	}
	p.applyVerdict(node, 1, true)
	p.parked(run, provision.StepDeploy, "; the node is "+ofDrift)
	if sent.Calls(read) == 0 {
		t.Errorf("%s was not seen", read)
	}
	refuse("")
	p.applyVerdict(node, 2, false)
	p.rests(id, "active")
}
