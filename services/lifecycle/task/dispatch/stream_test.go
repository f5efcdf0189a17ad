package dispatch_test

import (
	"context"
	"errors"
	"net"
	"strings"
	"testing"

	"connectrpc.com/connect"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1/lifecyclev1connect"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/rpc/assertion"
	"github.com/gpuaas/mesh/internal/rpc/calls"
	"github.com/gpuaas/mesh/internal/rpc/port"
	"github.com/gpuaas/mesh/internal/rpc/rpctest"
	"github.com/gpuaas/mesh/internal/testkit"
)

// streamed is lifecycle's server with the kit's tasks.
type streamed struct {
	k           *kit
	authorities *rpctest.Authorities
	registry    *obs.Registry
	url         string
	drain       func() // makes the server stop
}

func newStreamed(t *testing.T) *streamed {
	t.Helper()
	s := &streamed{k: newKit(t), authorities: rpctest.NewAuthorities(t)}
	var err error
	if s.registry, err = obs.NewRegistry(); err != nil {
		t.Fatal(err)
	}
	server, err := port.New(testkit.Context(t),
		port.Deps{
			Logger: testkit.Logger(t), Registerer: s.registry.ForService("lifecycle"),
			Persons: assertion.NewVerifier(nil, nil),
		},
		port.Config{Name: "internal", Addr: "127.0.0.1:0", TLS: s.authorities.ServerTLS(t, "lifecycle")})
	if err != nil {
		t.Fatal(err)
	}
	if err := server.Mount(lifecyclev1connect.NewTaskServiceHandler(s.k.tasks, server.HandlerOptions()...)); err != nil {
		t.Fatal(err)
	}
	ctx, drain := context.WithCancel(testkit.Context(t))
	ended := make(chan error, 1)
	go func() { ended <- server.Run(ctx) }()
	t.Cleanup(func() {
		drain()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	s.url, s.drain = server.URL(), drain
	return s
}

type workStream = connect.BidiStreamForClientSimple[lifecyclev1.StreamWorkRequest, lifecyclev1.StreamWorkResponse]

// open opens a stream as a service, and returns the stream with its first message.
func (s *streamed) open(service string) (*workStream, error) {
	t := s.k.t
	t.Helper()
	client := lifecyclev1connect.NewTaskServiceClient(s.authorities.Client(t, "lifecycle",
		s.authorities.Service(t, service)), s.url,
		calls.Options(calls.Config{})...)
	stream, err := client.StreamWork(testkit.Context(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = stream.CloseRequest(), stream.CloseResponse() })
	if err := stream.Send(nil); err != nil {
		t.Fatal(err)
	}
	hello, err := stream.Receive()
	if err == nil && hello.GetId() != 0 {
		t.Errorf("the first answer is %v", hello)
	}
	return stream, err
}

// ask sends a request and returns the answer.
func (s *streamed) ask(stream *workStream, req *lifecyclev1.StreamWorkRequest) *lifecyclev1.StreamWorkResponse {
	s.k.t.Helper()
	req.TimeoutMs = 30_000
	if err := stream.Send(req); err != nil {
		s.k.t.Fatal(err)
	}
	res, err := stream.Receive()
	if err != nil {
		s.k.t.Fatal(err)
	}
	if res.GetId() != req.GetId() {
		s.k.t.Fatalf("asked %d, answered %d", req.GetId(), res.GetId())
	}
	return res
}

func leaseFrame(id int64, n *node) *lifecyclev1.StreamWorkRequest {
	return &lifecyclev1.StreamWorkRequest{
		Id: id,
		Request: &lifecyclev1.StreamWorkRequest_Lease{Lease: &lifecyclev1.LeaseTasksRequest{
			ReplicaId: ids.New(), Nodes: []*lifecyclev1.NodeLease{{
				NodeId: n.id, SessionId: n.session, Generation: n.generation,
				MaxTasks: 4,
			}},
		}},
	}
}

// TestAStreamCarriesLeasesAndReports checks that a task is leased and its result acknowledged over one stream, and that
// what is acknowledged is committed.
func TestAStreamCarriesLeasesAndReports(t *testing.T) {
	s := newStreamed(t)
	n := s.k.node()
	id := s.k.enqueue(n).TaskID
	stream, err := s.open("nodeapi")
	if err != nil {
		t.Fatal(err)
	}
	leased := s.ask(stream, leaseFrame(1, n)).GetLease().GetTasks()
	if len(leased) != 1 || leased[0].GetTask().GetTaskId() != id {
		t.Fatalf("leased %v", leased)
	}
	report := &lifecyclev1.NodeReport{
		NodeId: n.id, NodeInstanceId: n.instance, SessionId: n.session, Generation: n.generation, LedgerId: n.ledger,
		Results: []*nodev1.TaskResult{{Task: leased[0].GetTask(), State: succeeded}},
	}
	for call := int64(2); call < 4; call++ { // asked again, it is acknowledged again, and nothing is changed
		res := s.ask(stream, &lifecyclev1.StreamWorkRequest{Id: call, Request: &lifecyclev1.StreamWorkRequest_Report{
			Report: &lifecyclev1.ReportTasksRequest{ReplicaId: ids.New(), Reports: []*lifecyclev1.NodeReport{report}},
		}})
		results := res.GetReport().GetResults()
		if len(results) != 1 || len(results[0].GetAcknowledged()) != 1 {
			t.Fatalf("answered %v", res)
		}
		s.k.wants(id, succeeded, 1, 0)
	}
}

// TestAFrameIsHeldToTheRulesOfItsCall checks that a frame that is not valid is refused as its call would be, that the
// stream goes on, and that frames count in the metrics of the calls whose place they take.
func TestAFrameIsHeldToTheRulesOfItsCall(t *testing.T) {
	s := newStreamed(t)
	n := s.k.node()
	stream, err := s.open("nodeapi")
	if err != nil {
		t.Fatal(err)
	}
	bad := leaseFrame(1, n)
	bad.GetLease().Nodes[0].MaxTasks = 10_000
	denial := s.ask(stream, bad).GetDenial()
	if denial.GetReason() != commonv1.Reason_REASON_INVALID_ARGUMENT || len(denial.GetUnmet()) != 1 {
		t.Errorf("a frame that is not valid: %v", denial)
	}
	res := s.ask(stream, &lifecyclev1.StreamWorkRequest{Id: 2})
	if res.GetDenial().GetReason() != commonv1.Reason_REASON_UNIMPLEMENTED {
		t.Errorf("a frame that asks for nothing: %v", res)
	}
	if res := s.ask(stream, leaseFrame(3, n)); res.GetLease() == nil {
		t.Errorf("after a refusal: %v", res)
	}
	families, err := s.registry.Gatherer().Gather()
	if err != nil {
		t.Fatal(err)
	}
	counted := map[string]uint64{}
	for _, family := range families {
		for _, m := range family.GetMetric() {
			labels := map[string]string{}
			for _, l := range m.GetLabel() {
				labels[l.GetName()] = l.GetValue()
			}
			if labels["procedure"] == lifecyclev1connect.TaskServiceLeaseTasksProcedure && m.GetHistogram() != nil {
				counted[labels["code"]] += m.GetHistogram().GetSampleCount()
			}
		}
	}
	if counted["ok"] != 1 || counted["invalid_argument"] != 1 {
		t.Errorf("counted %v", counted)
	}
}

// TestNoOtherServiceStreamsWork checks that a stream is refused to a service that may not make its calls.
func TestNoOtherServiceStreamsWork(t *testing.T) {
	s := newStreamed(t)
	if _, err := s.open("recovery"); rpctest.ReasonOfWire(err) != commonv1.Reason_REASON_PERMISSION_DENIED {
		t.Errorf("recovery opens a stream of work: %v", err)
	}
}

// TestAFrameUnderWayOutlivesTheDrain checks that a request from before the drain signal is served and answered, and
// that the stream ends after it.
func TestAFrameUnderWayOutlivesTheDrain(t *testing.T) {
	s := newStreamed(t)
	n := s.k.node()
	id := s.k.enqueue(n).TaskID
	stream, err := s.open("nodeapi")
	if err != nil {
		t.Fatal(err)
	}
	ctx := testkit.Context(t)
	held, err := s.k.pool.Begin(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer held.Rollback(context.WithoutCancel(ctx)) // it is committed below
	if _, err := held.Exec(ctx, `SELECT FROM lifecycle.node_gate WHERE node_id = $1 FOR UPDATE`, n.id); err != nil {
		t.Fatal(err)
	}
	frame := leaseFrame(1, n)
	frame.TimeoutMs = 30_000
	if err := stream.Send(frame); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, testkit.Patience, func() error { return s.k.waiting(ctx) })
	s.drain()
	testkit.Eventually(t, testkit.Patience, func() error { // the order has come to the streams
		conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", strings.TrimPrefix(s.url, "https://"))
		if err != nil {
			return nil //nolint:nilerr // what is waited for
		}
		return errors.Join(errors.New("the port takes connections"), conn.Close())
	})
	if err := held.Commit(ctx); err != nil {
		t.Fatal(err)
	}
	res, err := stream.Receive()
	if err != nil || len(res.GetLease().GetTasks()) != 1 || res.GetLease().GetTasks()[0].GetTask().GetTaskId() != id {
		t.Fatalf("answered %v, %v", res, err)
	}
	if _, err := stream.Receive(); rpctest.ReasonOfWire(err) != commonv1.Reason_REASON_SERVER_DRAINING {
		t.Errorf("the stream ended with %v", err)
	}
}
