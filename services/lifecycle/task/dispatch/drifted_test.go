package dispatch_test

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"google.golang.org/protobuf/proto"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/gate"
	"github.com/gpuaas/mesh/services/lifecycle/task"
)

// applyVerdict applies the version of a node's verdict that its host is not as it was accepted, or that it is again.
func (k *kit) applyVerdict(n *node, version int64, drifted bool) {
	k.t.Helper()
	const drift = commonv1.DriftReason_DRIFT_REASON_HOST_RUNTIME_DRIFT
	verdict := &recoveryv1.NodeVerdict{NodeId: n.id, Version: version, Ended: &recoveryv1.VerdictPeriod{Reason: drift}}
	if drifted {
		verdict = &recoveryv1.NodeVerdict{NodeId: n.id, Version: version, Reason: drift}
	}
	body, err := proto.Marshal(verdict)
	if err != nil {
		k.t.Fatal(err)
	}
	record := events.Record{
		Kind: "verdict.changed", Source: pg.RoleRecovery, AggregateType: "verdict", AggregateID: n.id,
		AggregateVersion: version, Body: body, BodyType: string(verdict.ProtoReflect().Descriptor().FullName()),
	}
	cordons := gate.Cordons{Logger: testkit.Logger(k.t), Policy: policy.Fixed{Set: policy.Defaults()}}
	if err := pg.InTx(k.t.Context(), k.pool, func(ctx context.Context, tx pgx.Tx) error {
		return cordons.OnVerdicts(ctx, tx, []events.Record{record})
	}); err != nil {
		k.t.Fatal(err)
	}
}

// onDrifted are the types of tasks that are leased to a node whose host is not as it was accepted.
var onDrifted = []commonv1.TaskType{
	commonv1.TaskType_TASK_TYPE_PROBE_NOOP, commonv1.TaskType_TASK_TYPE_DIAGNOSTICS_COLLECT,
	commonv1.TaskType_TASK_TYPE_WORKLOAD_STATUS, commonv1.TaskType_TASK_TYPE_WORKLOAD_STOP,
	commonv1.TaskType_TASK_TYPE_WORKLOAD_REMOVE, commonv1.TaskType_TASK_TYPE_STORAGE_RELEASE,
}

// TestOnADriftedHostOnlyWhatStartsNothingIsLeased holds of each type of task, leased as it is queued and when it is
// asked for: while the verdict of host_runtime_drift cordons the node, alone or beside a person's cordon, only those
// that start nothing there are, and the node is not listed for any other. A person who ends the cordon of the verdict
// lets all types on the node again; one who ends their own cordon leaves that of the verdict.
func TestOnADriftedHostOnlyWhatStartsNothingIsLeased(t *testing.T) {
	s := newStreamed(t)
	k := s.k
	stream, err := s.open("nodeapi")
	if err != nil {
		t.Fatal(err)
	}
	drifted, both := k.node(), k.node()
	k.cordon(both, true)
	for _, n := range []*node{drifted, both} {
		k.applyVerdict(n, 1, true)
	}
	list := k.hub.List(100)
	for _, kind := range names.All[commonv1.TaskType]() {
		if kind == commonv1.TaskType_TASK_TYPE_UNSPECIFIED {
			continue
		}
		may := slices.Contains(onDrifted, kind)
		if task.StartsNothing(names.Of(kind)) != may {
			t.Errorf("%s: StartsNothing is %t", names.Of(kind), !may)
		}
		for _, n := range []*node{drifted, both} {
			s.leaseStanding(stream, n)
			asQueued := s.probe(n, ofType(kind))
			if may {
				k.result(n, s.offered(stream, n, asQueued), succeeded)
			} else {
				k.wants(asQueued, queued, 0, 0)
			}
			asked := k.enqueue(n, ofType(kind)).TaskID
			list.Next(t.Context()) // has the hints of what was queued
			if due, _ := list.Next(t.Context()); slices.Contains(due, n.id) != may {
				t.Errorf("%s: the node is listed as one with work: %t", names.Of(kind), !may)
			}
			leased := k.leaseOf(n)
			if len(leased.GetRefused()) > 0 || (len(leased.GetTasks()) == 1) != may {
				t.Errorf("%s: leased %d, refused %v", names.Of(kind), len(leased.GetTasks()), leased.GetRefused())
			}
			for _, one := range leased.GetTasks() {
				k.result(n, one.GetTask(), succeeded)
			}
			for _, id := range []string{asQueued, asked} {
				if may {
					k.wants(id, succeeded, 1, 0)
				} else {
					k.wants(id, queued, 0, 0)
				}
			}
			k.drop(asQueued, asked)
		}
	}
	waits := k.enqueue(drifted, ofType(deploy))
	k.cordon(drifted, false)
	k.lease(drifted)
	k.wants(waits.TaskID, dispatched, 1, 0)
	waits = k.enqueue(both, ofType(deploy))
	k.cordon(both, false)
	if got := k.leaseOf(both).GetTasks(); len(got) > 0 {
		t.Errorf("leased %v", got)
	}
	k.applyVerdict(both, 2, false)
	k.lease(both)
	k.wants(waits.TaskID, dispatched, 1, 0)
}

// TestWhatIsOfferedAgainIsHeldToTheVerdict holds of each type of task that was offered before the verdict, and did not
// come through: it is offered again at once only if it starts nothing, and after the end of the verdict in any case.
func TestWhatIsOfferedAgainIsHeldToTheVerdict(t *testing.T) {
	k := newKit(t)
	testkit.StopClock(k.db)
	n, at := k.node(), time.Duration(0)
	for i, kind := range names.All[commonv1.TaskType]() {
		if kind == commonv1.TaskType_TASK_TYPE_UNSPECIFIED {
			continue
		}
		may := slices.Contains(onDrifted, kind)
		k.enqueue(n, ofType(kind))
		k.lease(n)
		k.applyVerdict(n, int64(2*i), true)
		at += 3 * time.Second
		testkit.SetClockOffset(k.db, at)
		if got := k.leaseOf(n).GetTasks(); (len(got) == 1) != may {
			t.Errorf("%s: offered again %d times", names.Of(kind), len(got))
		}
		k.applyVerdict(n, int64(2*i)+1, false)
		at += 3 * time.Second
		testkit.SetClockOffset(k.db, at)
		k.result(n, k.lease(n), succeeded)
	}
}

func (k *kit) cordon(n *node, cordoned bool) {
	k.t.Helper()
	if _, err := k.gates.SetCordon(k.t.Context(),
		&lifecyclev1.SetCordonRequest{NodeId: n.id, Cordoned: cordoned, Reason: "test"}); err != nil {
		k.t.Fatal(err)
	}
}

// drop removes tasks, so that the next list of nodes with work does not have them.
func (k *kit) drop(tasks ...string) {
	k.t.Helper()
	if _, err := k.db.OwnerPool().Exec(k.t.Context(), `DELETE FROM lifecycle.task WHERE task_id = ANY ($1::uuid[])`,
		tasks); err != nil {
		k.t.Fatal(err)
	}
}
