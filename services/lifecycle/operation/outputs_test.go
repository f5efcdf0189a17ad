package operation

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/rpc"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/outputs"
)

// fakeRelay is a replica of nodeapi that records the requests it got.
type fakeRelay struct {
	asked []*nodev1.ReadOutputRequest
	fail  error
}

func (f *fakeRelay) ReadOutput(_ context.Context, req *nodev1.ReadOutputRequest) (*nodev1.ReadOutputResponse, error) {
	f.asked = append(f.asked, req)
	return &nodev1.ReadOutputResponse{Output: &nodev1.WorkloadOutput{Data: []byte("out")}}, f.fail
}

// TestOutputIsReadWhereTheWorkspaceRuns: for a caller who may read it, of the workload that is meant, from the replica
// that has the node's session.
func TestOutputIsReadWhereTheWorkspaceRuns(t *testing.T) {
	p := newCluster(t, clusterConfig{seats: 1, lease: 15 * time.Second})
	id := p.provision("demo", 0, nil)
	w := p.rests(id, "active")
	relay, dialled := &fakeRelay{}, []string{}
	pool := p.db.Pool(pg.RoleLifecycle)
	reader := outputs.NewServer(outputs.Deps{DB: pool, Dial: func(address string) outputs.Relay {
		dialled = append(dialled, address)
		return relay
	}})
	read := func(person rpc.Person, req *lifecyclev1.ReadOutputRequest) error {
		relay.asked = nil
		if req.GetWorkspaceId() == "" {
			req.WorkspaceId = id
		}
		res, err := reader.ReadOutput(rpc.WithPerson(testkit.Context(t), person), req)
		if err == nil && (res.GetWorkload() != "main" || string(res.GetOutput().GetData()) != "out" ||
			len(relay.asked) != 1) {
			t.Errorf("%v answered for %v", res, relay.asked)
		}
		return err
	}
	operator := rpc.Person{Subject: "op", Roles: []string{"operator"}}
	own := rpc.Person{Subject: "ann", TenantID: w.TenantID, Roles: []string{"tenant"}}
	for _, person := range []rpc.Person{operator, own} {
		if err := read(person, &lifecyclev1.ReadOutputRequest{
			Previous: true,
			From:     &nodev1.OutputCursor{Run: "r", Offset: 3},
		}); err != nil {
			t.Fatalf("%s: %v", person.Subject, err)
		}
		if got := relay.asked[0]; got.GetNodeId() != w.NodeID || got.GetEpoch() != w.Epoch || got.GetWorkload() != "main" ||
			!got.GetPrevious() || got.GetFrom().GetOffset() != 3 {
			t.Errorf("nodeapi is asked %v", got)
		}
	}
	if len(dialled) != 1 || dialled[0] != "nodeapi.example:7443" {
		t.Errorf("dialled %q", dialled)
	}
	refused := func(what string, person rpc.Person, req *lifecyclev1.ReadOutputRequest, reason commonv1.Reason) string {
		t.Helper()
		err := read(person, req)
		f, ok := fault.As(err)
		if !ok || f.Reason != reason || f.Remedy == "" || len(relay.asked) != 0 {
			t.Errorf("%s: %v, asked %d times; want %v with a remedy", what, err, len(relay.asked), reason)
		}
		return err.Error()
	}
	for _, role := range []string{"viewer", "security"} {
		refused(role, rpc.Person{Subject: role, Roles: []string{role}}, &lifecyclev1.ReadOutputRequest{},
			commonv1.Reason_REASON_PERMISSION_DENIED)
	}
	eve := rpc.Person{Subject: "eve", TenantID: ids.New(), Roles: []string{"tenant", "operator"}}
	foreign := refused("another tenant", eve, &lifecyclev1.ReadOutputRequest{}, commonv1.Reason_REASON_NOT_FOUND)
	unknown := ids.New()
	absent := refused("a workspace that does not exist", eve, &lifecyclev1.ReadOutputRequest{WorkspaceId: unknown},
		commonv1.Reason_REASON_NOT_FOUND)
	if strings.ReplaceAll(absent, unknown, w.ID) != foreign {
		t.Errorf("another tenant's: %s; one that does not exist: %s", foreign, absent)
	}
	refused("an unknown workload", own, &lifecyclev1.ReadOutputRequest{Workload: "other"},
		commonv1.Reason_REASON_NOT_FOUND)
	sql := func(text string, args ...any) {
		t.Helper()
		if _, err := pool.Exec(t.Context(), text, args...); err != nil {
			t.Fatal(err)
		}
	}
	testkit.Beat(p.db, p.world.replica, "", 0, false)
	refused("a replica of an earlier version", own, &lifecyclev1.ReadOutputRequest{}, commonv1.Reason_REASON_UNAVAILABLE)
	testkit.Beat(p.db, p.world.replica, "x:1", -time.Minute, false)
	refused("a replica that is gone", own, &lifecyclev1.ReadOutputRequest{}, commonv1.Reason_REASON_NODE_NOT_CONNECTED)
	p.beat(time.Hour)
	sql(`UPDATE lifecycle.node_gate SET session_open = false WHERE node_id = $1`, w.NodeID)
	refused("a node that is not connected", own, &lifecyclev1.ReadOutputRequest{},
		commonv1.Reason_REASON_NODE_NOT_CONNECTED)
	sql(`UPDATE lifecycle.node_gate SET session_open = true WHERE node_id = $1`, w.NodeID)
	relay.fail = fault.New(commonv1.Reason_REASON_RATE_LIMITED, "too soon", fault.RetryAfter(time.Second))
	if err := read(own, &lifecyclev1.ReadOutputRequest{}); !fault.Has(err, commonv1.Reason_REASON_RATE_LIMITED) ||
		fault.RetryAfterOf(err) != time.Second {
		t.Errorf("what the replica refuses: %v", err)
	}
	relay.fail = nil
	if _, err := p.seats[0].ask(t.Context(), commonv1.OperationKind_OPERATION_KIND_DECOMMISSION, id); err != nil {
		t.Fatal(err)
	}
	p.rests(id, "decommissioned")
	refused("a workspace without an instance", own, &lifecyclev1.ReadOutputRequest{},
		commonv1.Reason_REASON_PRECONDITION_FAILED)
	if got := fault.From(read(own, &lifecyclev1.ReadOutputRequest{})).Unmet; !slices.Equal(got,
		[]string{"the workspace has no instance"}) {
		t.Errorf("what stands in the way: %q", got)
	}
}
