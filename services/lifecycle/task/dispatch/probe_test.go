package dispatch_test

import (
	"net/http"
	"strings"
	"testing"
	"time"

	"buf.build/go/protovalidate"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/rpc"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/task/dispatch"
)

// TestProbesOfNodes checks that recovery's probes are queued once for each key of a node, that a node that is not there
// is refused alone, that an answer to a repeated request has the state of the probe, and that the tasks past their time
// which still count as open are counted.
func TestProbesOfNodes(t *testing.T) {
	k := newKit(t)
	a, b, gone := k.node(), k.node(), ids.New()
	probes := dispatch.NewProbes(k.tasks)
	ask := func(key string) []*lifecyclev1.NodeProbed {
		t.Helper()
		req := &lifecyclev1.ProbeNodesRequest{}
		for _, id := range []string{a.id, gone, b.id} {
			req.Nodes = append(req.Nodes, &lifecyclev1.NodeProbe{NodeId: id, IdempotencyKey: key})
		}
		out, err := probes.ProbeNodes(t.Context(), req)
		if err != nil {
			t.Fatal(err)
		}
		for i, n := range req.GetNodes() {
			if out.GetNodes()[i].GetNodeId() != n.GetNodeId() {
				t.Fatalf("answer %d is of %s", i, out.GetNodes()[i].GetNodeId())
			}
		}
		return out.GetNodes()
	}
	first := ask("7/0")
	if first[1].GetTask() != nil || first[1].GetRefused() != commonv1.Reason_REASON_NOT_FOUND {
		t.Errorf("of a node that is not there: %v", first[1])
	}
	k.ready(a)
	ref := k.lease(a)
	if ref.GetTaskId() != first[0].GetTask().GetTaskId() {
		t.Fatalf("leased %v, want %v", ref, first[0])
	}
	again := ask("7/0")
	for i := range first {
		if again[i].GetTask().GetTaskId() != first[i].GetTask().GetTaskId() || again[i].GetExpiredCurrent() != 0 {
			t.Errorf("again: %v, first %v", again[i], first[i])
		}
	}
	if again[0].GetTask().GetState() != commonv1.TaskState_TASK_STATE_DISPATCHED ||
		again[2].GetTask().GetState() != commonv1.TaskState_TASK_STATE_QUEUED {
		t.Errorf("states: %v, %v", again[0].GetTask().GetState(), again[2].GetTask().GetState())
	}
	testkit.SetClockOffset(k.db, 2*time.Minute)
	late := ask("7/1")
	for _, i := range []int{0, 2} {
		if late[i].GetTask().GetTaskId() == first[i].GetTask().GetTaskId() || late[i].GetExpiredCurrent() != 1 ||
			late[i].GetOldestExpiredAt().AsTime().After(first[i].GetTask().GetExpiresAt().AsTime()) {
			t.Errorf("after its time: %v", late[i])
		}
	}
}

// TestRecordsOfHosts checks that recovery's question is one task for each key of a node, that the answer to a repeated
// request has what the agent returned once it has, cut to its bounds, and that a node that is not there is refused
// alone.
func TestRecordsOfHosts(t *testing.T) {
	k := newKit(t)
	a, gone := k.node(), ids.New()
	k.ready(a)
	ask := func(key string) []*lifecyclev1.CollectedRecord {
		t.Helper()
		req := &lifecyclev1.CollectRecordsRequest{}
		for _, id := range []string{gone, a.id} {
			req.Nodes = append(req.Nodes, &lifecyclev1.RecordRequest{NodeId: id, IdempotencyKey: key})
		}
		out, err := k.tasks.CollectRecords(t.Context(), req)
		if err != nil {
			t.Fatal(err)
		}
		return out.GetNodes()
	}
	first := ask("verdict/7")
	if first[0].GetTask() != nil || first[0].GetRefused() != commonv1.Reason_REASON_NOT_FOUND ||
		len(first[1].GetDiagnostics()) != 0 {
		t.Fatalf("first %v", first)
	}
	ref := k.lease(a)
	if ref.GetTaskId() != first[1].GetTask().GetTaskId() {
		t.Fatalf("leased %v, want %v", ref, first[1])
	}
	k.delivered(a, ref)
	k.started(a, ref)
	output, err := proto.Marshal(&nodev1.DiagnosticReport{Diagnostics: []*commonv1.Diagnostic{{
		Code: commonv1.DiagnosticCode_DIAGNOSTIC_CODE_CONNECTION_REFUSED, Detail: strings.Repeat("x", 4000),
	}}})
	if err != nil {
		t.Fatal(err)
	}
	// Fields that this build does not know, of the report and of an entry.
	unknown := protowire.AppendBytes(protowire.AppendTag(nil, 1000, protowire.BytesType), make([]byte, 10_000))
	entry := protowire.AppendBytes(protowire.AppendTag(nil, 1, protowire.BytesType), unknown)
	output = append(append(output, entry...), unknown...)
	k.report(a, func(r *lifecyclev1.NodeReport) {
		r.Results = []*nodev1.TaskResult{{
			Task: ref, State: commonv1.TaskState_TASK_STATE_SUCCEEDED, Output: output,
		}}
	})
	again := ask("verdict/7")[1]
	if again.GetTask().GetTaskId() != ref.GetTaskId() || len(again.GetDiagnostics()) != 2 ||
		len(again.GetDiagnostics()[0].GetDetail()) > 512 || proto.Size(again) > 2000 {
		t.Errorf("again %d entries in %d bytes, of %v", len(again.GetDiagnostics()), proto.Size(again), again.GetTask())
	}
	if other := ask("verdict/8")[1]; other.GetTask().GetTaskId() == ref.GetTaskId() || len(other.GetDiagnostics()) != 0 {
		t.Errorf("of another verdict: %v", other)
	}
}

// TestEveryCorrelationIDMayBeAskedWith checks that requests of recovery may carry each correlation id that a call may
// have.
func TestEveryCorrelationIDMayBeAskedWith(t *testing.T) {
	longest := strings.Repeat("c", 128)
	header := http.Header{}
	rpc.WriteCorrelation(obs.With(t.Context(), obs.Correlation{CorrelationID: longest}), header)
	if got := obs.From(rpc.ReadCorrelation(t.Context(), header, true)).CorrelationID; got != longest {
		t.Fatalf("a call has %q", got)
	}
	for _, m := range []proto.Message{
		&lifecyclev1.RecordRequest{NodeId: ids.New(), IdempotencyKey: "verdict/7", CorrelationId: longest},
		&lifecyclev1.NodeProbe{NodeId: ids.New(), IdempotencyKey: "7/0", CorrelationId: longest},
	} {
		if err := protovalidate.Validate(m); err != nil {
			t.Error(err)
		}
	}
}
