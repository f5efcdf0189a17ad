package view_test

import (
	"context"
	"strings"
	"testing"

	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/readmodel/list"
	"github.com/gpuaas/mesh/services/readmodel/project"
	"github.com/gpuaas/mesh/services/readmodel/view"
)

// Scenario: the driver of many nodes changes, which is one incident, and the cordons of two wait. The nodes say so in
// what is to be done, and the incident of that reason counts them; another incident, and one that is over, do not.
func TestCordonsThatWaitAreShown(t *testing.T) {
	k := newKit(t)
	at := timestamppb.New(k.Now())
	for _, node := range []string{k.A.NodeID, k.B.NodeID} {
		k.AppendVersion(&lifecyclev1.NodeGate{
			NodeId: node, Admitted: true, FenceEpoch: 1, Version: 100, WaitingCordonSince: at,
			WaitingCordon: "the host is not as it was accepted: kernel 6.2 in place of 6.1",
		}, 100)
	}
	incident := func(reason string, closed bool) string {
		t.Helper()
		i := &recoveryv1.Incident{
			IncidentId: ids.New(), Kind: commonv1.IncidentKind_INCIDENT_KIND_FLEET_DRIFT, ErrorCode: reason, OpenedAt: at,
			Summary: "many nodes", Version: 1,
		}
		if closed {
			i.ClosedAt = at
		}
		k.AppendRaw(pg.RoleRecovery, events.Event{
			Kind: project.KindIncident, AggregateType: "incident", AggregateID: i.GetIncidentId(), AggregateVersion: 1,
			Payload: i,
		})
		return i.GetIncidentId()
	}
	of := map[string]int32{
		incident("host_runtime_drift", false): 2, incident("agent_down", false): 0, incident("host_runtime_drift", true): 0,
	}
	k.sync()
	n, err := k.node(k.A.NodeName)
	if err != nil || !strings.Contains(n.GetNextAction(), "`gpuaas nodes cordon NODE") ||
		!strings.Contains(n.GetNextAction(), "brake.fleet_fraction") || n.GetGate().GetWaitingCordonSince() == nil {
		t.Errorf("%v, %v", n, err)
	}
	for id, want := range of {
		err := k.read(list.All(), func(ctx context.Context, s *view.Snapshot) error {
			i, _, err := s.Incident(ctx, id)
			if err != nil {
				return err
			}
			got, err := s.CordonsWaiting(ctx, i)
			if said := strings.Contains(i.GetSummary(), "the cordons of 2 of them wait"); got != want || said != (want > 0) {
				t.Errorf("%s: %d cordons wait: %s", i.GetErrorCode(), got, i.GetSummary())
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
}
