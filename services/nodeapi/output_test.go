package nodeapi_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/gen/gpuaas/node/v1/nodev1connect"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/rpc/calls"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/nodeapi/nodeapitest"
)

// relayAs returns a client of a replica's internal port with the certificate of a service.
func (k *kit) relayAs(service, addr string) nodev1connect.RelayServiceClient {
	k.t.Helper()
	store, err := k.services.Service(service)
	if err != nil {
		k.t.Fatal(err)
	}
	roots, err := k.services.Bundle()
	if err != nil {
		k.t.Fatal(err)
	}
	client, err := calls.HTTPClient(pki.ClientConfig{
		Store: store, Roots: roots,
		Server: pki.ServiceID(nodeapitest.TrustDomain, "nodeapi"),
	}, calls.HTTPConfig{})
	if err != nil {
		k.t.Fatal(err)
	}
	k.t.Cleanup(client.CloseIdleConnections)
	return nodev1connect.NewRelayServiceClient(client, "https://"+addr, calls.Options(calls.Config{})...)
}

func isOutputRequest(f *nodev1.ConnectResponse) bool { return f.GetOutputRequest() != nil }

// TestOutputIsReadThroughTheSession checks that output is read at the address in the replica's beat, and by lifecycle
// alone. Tasks go on while an agent is slow to answer.
func TestOutputIsReadThroughTheSession(t *testing.T) {
	k := newKit(t)
	r := k.replica()
	var address string
	testkit.Eventually(t, patience, func() error {
		return k.db.Pool(pg.RoleLifecycle).QueryRow(t.Context(), `SELECT address FROM mesh.replica WHERE replica_id = $1`,
			r.ReplicaID()).Scan(&address)
	})
	if address != r.Addr() {
		t.Fatalf("the beat tells %q, the replica listens at %q", address, r.Addr())
	}
	old := k.session(r)
	a := k.node()
	k.connect(a, r.AgentAddr(), true)
	a.open(func(h *nodev1.Hello) { h.ProtocolVersion = 2 })
	k.raised(a)

	lifecycle, ws := k.relayAs("lifecycle", address), ids.New()
	ask := func(node, workload string) *nodev1.ReadOutputRequest {
		return &nodev1.ReadOutputRequest{
			NodeId: node, WorkspaceId: ws, Epoch: 3, Workload: workload,
			From: &nodev1.OutputCursor{Run: "r", Offset: 7}, MaxBytes: 100,
		}
	}
	for name, tc := range map[string]struct {
		client nodev1connect.RelayServiceClient
		node   string
		want   commonv1.Reason
	}{
		"another service":              {k.relayAs("readmodel", address), a.id, commonv1.Reason_REASON_PERMISSION_DENIED},
		"a node without a session":     {lifecycle, ids.New(), commonv1.Reason_REASON_NODE_NOT_CONNECTED},
		"an agent of an older version": {lifecycle, old.id, commonv1.Reason_REASON_AGENT_OUTDATED},
	} {
		if _, err := tc.client.ReadOutput(t.Context(), ask(tc.node, "main")); !fault.Has(err, tc.want) {
			t.Errorf("%s: %v, want %v", name, err, tc.want)
		}
	}

	type answer struct {
		res *nodev1.ReadOutputResponse
		err error
	}
	read := func(workload string) chan answer {
		out := make(chan answer, 1)
		go func() {
			res, err := lifecycle.ReadOutput(testkit.Context(t), ask(a.id, workload))
			out <- answer{res, err}
		}()
		return out
	}
	waiting := read("main")
	req := a.next("a request for output", isOutputRequest).GetOutputRequest()
	if req.GetWorkspaceId() != ws || req.GetEpoch() != 3 || req.GetWorkload() != "main" ||
		req.GetFrom().GetOffset() != 7 || req.GetMaxBytes() != 100 {
		t.Errorf("the agent is asked for %v", req)
	}
	again := <-read("main")
	if f, ok := fault.As(again.err); !ok || f.Reason != commonv1.Reason_REASON_RATE_LIMITED || f.RetryAfter <= 0 ||
		f.RetryAfter > 2*time.Second {
		t.Errorf("the second read at once: %v", again.err)
	}
	// The agent is slow to answer. Tasks are offered and their results acknowledged meanwhile.
	task := nodeapitest.Task(a.id, 100)
	k.backend.Queue(a.id, true, task)
	a.next("an offer", isOffer)
	a.send(
		&nodev1.ConnectRequest{
			Frame: &nodev1.ConnectRequest_TaskDelivered{
				TaskDelivered: &nodev1.TaskDelivered{Tasks: []*nodev1.TaskRef{task.GetTask()}},
			},
		},
	)
	a.send(result(task.GetTask(), []byte("out")))
	a.next("an acknowledgement", isAck)
	want := &nodev1.WorkloadOutput{
		Run: "r", Offset: 7, Data: []byte("bytes \x00\xff"),
		Next: &nodev1.OutputCursor{Run: "r", Offset: 15},
	}
	chunk := func(id string) *nodev1.ConnectRequest {
		return &nodev1.ConnectRequest{
			Frame: &nodev1.ConnectRequest_OutputChunk{OutputChunk: &nodev1.OutputChunk{RequestId: id, Output: want}},
		}
	}
	a.send(chunk(ids.New())) // an answer for which there is no request
	a.send(chunk(req.GetRequestId()))
	got := <-waiting
	if got.err != nil || string(got.res.GetOutput().GetData()) != string(want.GetData()) ||
		got.res.GetOutput().GetNext().GetOffset() != 15 {
		t.Fatalf("read %v, %v", got.res, got.err)
	}
	// The end of the session ends the requests that wait for it.
	waiting = read("other")
	a.next("a request for output", isOutputRequest)
	a.cancel()
	if got := <-waiting; !fault.Has(got.err, commonv1.Reason_REASON_NODE_NOT_CONNECTED) {
		t.Errorf("after the end of the session: %v", got.err)
	}
	for _, e := range testkit.Events(t, k.db.Pool(pg.RoleReadmodel), `true`) {
		if text := fmt.Sprint(e.Message); strings.Contains(text, "bytes ") {
			t.Errorf("the output is in the event %s", text)
		}
	}
}
