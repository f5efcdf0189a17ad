package work

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"connectrpc.com/connect"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/fault"
)

// pipe is a stream to a lifecycle whose part the test plays.
type pipe struct {
	asked    chan *lifecyclev1.StreamWorkRequest
	answers  chan *lifecyclev1.StreamWorkResponse
	ended    context.Context // as a real stream has
	refusal  error           // of the stream
	greeting bool            // was received
}

func (p *pipe) Send(req *lifecyclev1.StreamWorkRequest) error {
	if req == nil {
		return nil
	}
	select {
	case p.asked <- req:
		return nil
	case <-p.ended.Done():
		return io.EOF
	}
}

func (p *pipe) Receive() (*lifecyclev1.StreamWorkResponse, error) {
	if p.refusal != nil {
		return nil, p.refusal
	}
	if !p.greeting {
		p.greeting = true
		return &lifecyclev1.StreamWorkResponse{}, nil
	}
	select {
	case res, ok := <-p.answers:
		if !ok {
			return nil, io.ErrUnexpectedEOF
		}
		return res, nil
	case <-p.ended.Done():
		return nil, p.ended.Err()
	}
}

func (*pipe) CloseRequest() error  { return nil }
func (*pipe) CloseResponse() error { return nil }

// byCall counts the requests that go as calls.
type byCall struct{ leases, reports int }

func (b *byCall) LeaseTasks(context.Context, *lifecyclev1.LeaseTasksRequest) (*lifecyclev1.LeaseTasksResponse, error) {
	b.leases++
	return &lifecyclev1.LeaseTasksResponse{More: []string{"by call"}}, nil
}

func (b *byCall) ReportTasks(context.Context, *lifecyclev1.ReportTasksRequest) (*lifecyclev1.ReportTasksResponse,
	error,
) {
	b.reports++
	return &lifecyclev1.ReportTasksResponse{}, nil
}

// streaming runs a Stream over pipes until the test's function ends. Each new pipe is sent on opened.
func streaming(t *testing.T, refusal error,
	do func(ctx context.Context, s *Stream, calls *byCall, opened <-chan *pipe),
) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		calls, opened := &byCall{}, make(chan *pipe, 100)
		s := NewStream(slog.New(slog.DiscardHandler), calls, func(ctx context.Context) (Connection, error) {
			p := &pipe{
				asked:   make(chan *lifecyclev1.StreamWorkRequest, 8),
				answers: make(chan *lifecyclev1.StreamWorkResponse, 8), ended: ctx, refusal: refusal,
			}
			opened <- p
			return p, nil
		}, func(*lifecyclev1.LeaseTasksResponse) []*lifecyclev1.NodeSession { return nil })
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- s.Run(ctx) }()
		synctest.Wait()
		do(ctx, s, calls, opened)
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

// TestAnswersFindTheirRequests checks that answers may come in any order, and that an answer without a waiting request
// does no harm.
func TestAnswersFindTheirRequests(t *testing.T) {
	streaming(t, nil, func(ctx context.Context, s *Stream, calls *byCall, opened <-chan *pipe) {
		p := <-opened
		got := make(chan string, 2)
		for range 2 {
			go func() {
				res, err := s.LeaseTasks(ctx, &lifecyclev1.LeaseTasksRequest{ReplicaId: "r"})
				got <- strings.Join(res.GetMore(), "") + errText(err)
			}()
		}
		first, second := <-p.asked, <-p.asked
		p.answers <- &lifecyclev1.StreamWorkResponse{Id: 4711}
		p.answers <- &lifecyclev1.StreamWorkResponse{Id: second.GetId(), Response: &lifecyclev1.StreamWorkResponse_Denial{
			Denial: fault.ToDenial(fault.New(commonv1.Reason_REASON_INVALID_ARGUMENT, "refused"), ""),
		}}
		if answer := <-got; !strings.Contains(answer, "refused") {
			t.Errorf("the second one got %q", answer)
		}
		p.answers <- &lifecyclev1.StreamWorkResponse{Id: first.GetId(), Response: &lifecyclev1.StreamWorkResponse_Lease{
			Lease: &lifecyclev1.LeaseTasksResponse{More: []string{"by stream"}},
		}}
		if answer := <-got; answer != "by stream" {
			t.Errorf("the first one got %q", answer)
		}
		if first.GetTimeoutMs() != 10_000 || calls.leases != 0 {
			t.Errorf("timeout %d ms, %d calls", first.GetTimeoutMs(), calls.leases)
		}
	})
}

// TestABrokenStreamFailsWhatIsOpen checks that requests without an answer fail like calls whose connection is lost,
// that requests go as calls meanwhile, so that a request which ends its stream is refused alone, and that another
// stream is opened.
func TestABrokenStreamFailsWhatIsOpen(t *testing.T) {
	streaming(t, nil, func(ctx context.Context, s *Stream, calls *byCall, opened <-chan *pipe) {
		p := <-opened
		failed := make(chan error, 1)
		go func() {
			_, err := s.ReportTasks(ctx, &lifecyclev1.ReportTasksRequest{ReplicaId: "r"})
			failed <- err
		}()
		<-p.asked
		close(p.answers)
		if err := <-failed; !fault.Has(err, commonv1.Reason_REASON_UNAVAILABLE) || timedOut(err) {
			t.Errorf("an open request of a broken stream: %v", err)
		}
		synctest.Wait()
		if _, err := s.ReportTasks(ctx, &lifecyclev1.ReportTasksRequest{ReplicaId: "r"}); err != nil || calls.reports != 1 {
			t.Errorf("while no stream stands: %v, %d calls", err, calls.reports)
		}
		p = <-opened
		synctest.Wait()
		go func() {
			_, err := s.ReportTasks(ctx, &lifecyclev1.ReportTasksRequest{ReplicaId: "r"})
			failed <- err
		}()
		p.answers <- &lifecyclev1.StreamWorkResponse{
			Id:       (<-p.asked).GetId(),
			Response: &lifecyclev1.StreamWorkResponse_Report{Report: &lifecyclev1.ReportTasksResponse{}},
		}
		if err := <-failed; err != nil || calls.reports != 1 {
			t.Errorf("over the next stream: %v, %d calls", err, calls.reports)
		}
	})
}

// TestAStreamThatSwallowsIsGivenUp checks that a request without an answer ends at its deadline, with an error that
// splits its batch, and that its stream is ended too.
func TestAStreamThatSwallowsIsGivenUp(t *testing.T) {
	streaming(t, nil, func(ctx context.Context, s *Stream, _ *byCall, opened <-chan *pipe) {
		p := <-opened
		began := time.Now()
		if _, err := s.LeaseTasks(ctx, &lifecyclev1.LeaseTasksRequest{ReplicaId: "r"}); !timedOut(err) ||
			time.Since(began) != callWithin {
			t.Errorf("after %s: %v", time.Since(began), err)
		}
		<-p.ended.Done()
		<-opened
	})
}

// TestAnOlderLifecycleIsAskedByCalls checks that requests to a build without streams go as calls, and that a stream is
// tried only once in a while.
func TestAnOlderLifecycleIsAskedByCalls(t *testing.T) {
	unknown := connect.NewError(connect.CodeUnimplemented, errors.New("404 Not Found"))
	streaming(t, unknown, func(ctx context.Context, s *Stream, calls *byCall, opened <-chan *pipe) {
		res, err := s.LeaseTasks(ctx, &lifecyclev1.LeaseTasksRequest{ReplicaId: "r"})
		if err != nil || len(res.GetMore()) != 1 || calls.leases != 1 {
			t.Errorf("leased %v, %v", res, err)
		}
		<-opened
		began := time.Now()
		<-opened
		if waited := time.Since(began); waited < pauseUnknown/2 {
			t.Errorf("asked for a stream again after %s", waited)
		}
	})
}

// TestALargeRequestGoesByItself checks that a request which would keep others waiting goes as a call.
func TestALargeRequestGoesByItself(t *testing.T) {
	streaming(t, nil, func(ctx context.Context, s *Stream, calls *byCall, _ <-chan *pipe) {
		if _, err := s.ReportTasks(ctx,
			&lifecyclev1.ReportTasksRequest{ReplicaId: strings.Repeat("r", mostStreamed)}); err != nil || calls.reports != 1 {
			t.Errorf("%v, %d calls", err, calls.reports)
		}
	})
}

func errText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// TestALeaseWithoutARequestIsOffered checks that a lease without a request is passed on, that sessions which took
// nothing of it are named to lifecycle, and that neither delays the results of requests.
func TestALeaseWithoutARequestIsOffered(t *testing.T) {
	streaming(t, nil, func(ctx context.Context, s *Stream, _ *byCall, opened <-chan *pipe) {
		s.offer = func(res *lifecyclev1.LeaseTasksResponse) []*lifecyclev1.NodeSession {
			var out []*lifecyclev1.NodeSession
			for _, task := range res.GetTasks() {
				if task.GetNodeId() != "here" {
					out = append(out, &lifecyclev1.NodeSession{NodeId: task.GetNodeId(), SessionId: task.GetSessionId()})
				}
			}
			return out
		}
		p := <-opened
		unasked := func(nodes ...string) *lifecyclev1.StreamWorkResponse {
			res := &lifecyclev1.LeaseTasksResponse{}
			for _, n := range nodes {
				res.Tasks = append(res.Tasks, &lifecyclev1.LeasedTask{NodeId: n, SessionId: "session of " + n})
			}
			return &lifecyclev1.StreamWorkResponse{Response: &lifecyclev1.StreamWorkResponse_Lease{Lease: res}}
		}
		p.answers <- unasked("here")
		p.answers <- unasked("gone", "here")
		end := <-p.asked
		if in := end.GetEnd().GetSessions(); len(in) != 1 || in[0].GetNodeId() != "gone" ||
			in[0].GetSessionId() != "session of gone" {
			t.Fatalf("asked %v", end)
		}
		got := make(chan error, 1)
		go func() {
			_, err := s.LeaseTasks(ctx, &lifecyclev1.LeaseTasksRequest{ReplicaId: "r"})
			got <- err
		}()
		lease := <-p.asked // the end is not answered yet
		p.answers <- &lifecyclev1.StreamWorkResponse{
			Id:       lease.GetId(),
			Response: &lifecyclev1.StreamWorkResponse_Lease{Lease: &lifecyclev1.LeaseTasksResponse{}},
		}
		if err := <-got; err != nil {
			t.Error(err)
		}
		p.answers <- &lifecyclev1.StreamWorkResponse{
			Id:       end.GetId(),
			Response: &lifecyclev1.StreamWorkResponse_End{End: &lifecyclev1.EndLeasesResponse{}},
		}
		synctest.Wait()
	})
}

// TestSessionsThatEndedAreNamed checks that sessions that ended are named to lifecycle, those that end during a request
// together, and none whose stream to lifecycle has ended before.
func TestSessionsThatEndedAreNamed(t *testing.T) {
	streaming(t, nil, func(_ context.Context, s *Stream, _ *byCall, opened <-chan *pipe) {
		p := <-opened
		synctest.Wait()
		named := func() (*lifecyclev1.StreamWorkRequest, []string) {
			synctest.Wait()
			select {
			case req := <-p.asked:
				var out []string
				for _, one := range req.GetEnd().GetSessions() {
					out = append(out, one.GetNodeId()+" "+one.GetSessionId())
				}
				return req, out
			default:
				return nil, nil
			}
		}
		s.Ended("a", "1")
		req, got := named()
		if len(got) != 1 || got[0] != "a 1" {
			t.Fatalf("named %v", got)
		}
		s.Ended("b", "2")
		s.Ended("c", "3")
		p.answers <- &lifecyclev1.StreamWorkResponse{
			Id:       req.GetId(),
			Response: &lifecyclev1.StreamWorkResponse_End{End: &lifecyclev1.EndLeasesResponse{}},
		}
		if _, got = named(); len(got) != 2 || got[0] != "b 2" || got[1] != "c 3" {
			t.Fatalf("named %v", got)
		}
		s.Ended("d", "4")
		close(p.answers)
		p = <-opened
		synctest.Wait()
		s.Ended("e", "5")
		if _, got = named(); len(got) != 1 || got[0] != "e 5" {
			t.Errorf("over the next stream %v are named", got)
		}
	})
}
