package relay_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/nodeapi/relay"
)

// fakeSession is an agent's session. It answers each request with reply; if that is nil it never answers.
type fakeSession struct {
	protocol int32
	gone     bool
	reply    func(*nodev1.OutputRequest)
}

func (f *fakeSession) Send(frame *nodev1.ConnectResponse) bool {
	if f.reply != nil {
		f.reply(frame.GetOutputRequest())
	}
	return true
}
func (f *fakeSession) Protocol() int32 { return f.protocol }
func (f *fakeSession) Gone() bool      { return f.gone }

func newRelay(t *testing.T, sess *fakeSession) *relay.Relay {
	t.Helper()
	return relay.New(relay.Deps{Logger: testkit.Logger(t), Session: func(string) relay.Session {
		if sess == nil {
			return nil
		}
		return sess
	}})
}

func request(node, workload string) *nodev1.ReadOutputRequest {
	return &nodev1.ReadOutputRequest{
		NodeId: node, WorkspaceId: "01970000-0000-7000-8000-00000000000a", Epoch: 1,
		Workload: workload,
	}
}

func wants(t *testing.T, what string, err error, reason commonv1.Reason) {
	t.Helper()
	f, ok := fault.As(err)
	if !ok || f.Reason != reason || f.Remedy == "" {
		t.Errorf("%s: %v, want %v with a remedy", what, err, reason)
	}
}

func TestOneReadInTwoSeconds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		node := ids.New()
		sess := &fakeSession{protocol: 2}
		r := newRelay(t, sess)
		sess.reply = func(req *nodev1.OutputRequest) {
			r.Chunk(node, &nodev1.OutputChunk{RequestId: req.GetRequestId(), Output: &nodev1.WorkloadOutput{Data: []byte("x")}})
		}
		read := func(workload string) error {
			_, err := r.ReadOutput(t.Context(), request(node, workload))
			return err
		}
		if err := read("a"); err != nil {
			t.Fatal(err)
		}
		time.Sleep(1500 * time.Millisecond) // the bubble's clock
		err := read("a")
		wants(t, "the second within two seconds", err, commonv1.Reason_REASON_RATE_LIMITED)
		if f, _ := fault.As(err); f.RetryAfter != 500*time.Millisecond {
			t.Errorf("to be asked again in %s", f.RetryAfter)
		}
		if err := read("b"); err != nil {
			t.Errorf("another workload: %v", err)
		}
		time.Sleep(500 * time.Millisecond) // the bubble's clock
		if err := read("a"); err != nil {
			t.Errorf("after two seconds: %v", err)
		}
	})
}

func TestRefusalsOfTheWay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		node := ids.New()
		_, err := newRelay(t, nil).ReadOutput(t.Context(), request(node, "a"))
		wants(t, "no session", err, commonv1.Reason_REASON_NODE_NOT_CONNECTED)
		_, err = newRelay(t, &fakeSession{protocol: 1}).ReadOutput(t.Context(), request(node, "a"))
		wants(t, "an agent of an earlier version", err, commonv1.Reason_REASON_AGENT_OUTDATED)
		_, err = newRelay(t, &fakeSession{protocol: 2, gone: true}).ReadOutput(t.Context(), request(node, "a"))
		wants(t, "a session that has just ended", err, commonv1.Reason_REASON_NODE_NOT_CONNECTED)
		began := time.Now()
		_, err = newRelay(t, &fakeSession{protocol: 2}).ReadOutput(t.Context(), request(node, "a"))
		wants(t, "an agent that does not answer", err, commonv1.Reason_REASON_DEADLINE_EXCEEDED)
		if waited := time.Since(began); waited != 5*time.Second {
			t.Errorf("it was waited for %s", waited)
		}
		for reason, want := range map[commonv1.Reason]commonv1.Reason{
			commonv1.Reason_REASON_NOT_FOUND:       commonv1.Reason_REASON_NOT_FOUND,
			commonv1.Reason_REASON_IDENTITY_HELD:   commonv1.Reason_REASON_UNAVAILABLE, // a reason that an agent may not give
			commonv1.Reason_REASON_UNAUTHENTICATED: commonv1.Reason_REASON_UNAVAILABLE,
		} {
			sess := &fakeSession{protocol: 2}
			r := newRelay(t, sess)
			sess.reply = func(req *nodev1.OutputRequest) {
				// another node's answer
				r.Chunk(ids.New(), &nodev1.OutputChunk{RequestId: req.GetRequestId(), Output: &nodev1.WorkloadOutput{}})
				r.Chunk(node, &nodev1.OutputChunk{RequestId: req.GetRequestId(), Denied: fault.ToDenial(fault.New(reason, ""), "")})
			}
			_, err := r.ReadOutput(t.Context(), request(node, "a"))
			wants(t, reason.String(), err, want)
		}
	})
}

// TestWhatWaitsIsBounded: few requests wait for an agent that never answers, and those for others go on.
func TestWhatWaitsIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		node, other := ids.New(), ids.New()
		sess := &fakeSession{protocol: 2}
		r := newRelay(t, sess)
		var waiting sync.WaitGroup
		errs := make(chan error, 64)
		for i := range 4 {
			waiting.Go(func() {
				_, err := r.ReadOutput(context.Background(), request(node, fmt.Sprintf("w%d", i)))
				errs <- err
			})
		}
		synctest.Wait()
		_, err := r.ReadOutput(t.Context(), request(node, "one-more"))
		wants(t, "the fifth of a node", err, commonv1.Reason_REASON_OVERLOADED)
		ctx, cancel := context.WithCancelCause(t.Context())
		cancel(errors.New("the person left"))
		_, err = r.ReadOutput(ctx, request(other, "w"))
		wants(t, "another node's", err, commonv1.Reason_REASON_DEADLINE_EXCEEDED)
		r.Gone(node, sess)
		waiting.Wait()
		for range 4 {
			wants(t, "after the end of the session", <-errs, commonv1.Reason_REASON_NODE_NOT_CONNECTED)
		}
	})
}

// Scenario: the outputs of as many workloads as the relay keeps are read within one moment, and then that of one more.
// It is refused until the first of them may be read again, and what is kept does not grow.
func TestTheWorkloadsThatAreReadAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		node := ids.New()
		sess := &fakeSession{protocol: 2}
		r := newRelay(t, sess)
		sess.reply = func(req *nodev1.OutputRequest) {
			r.Chunk(node, &nodev1.OutputChunk{RequestId: req.GetRequestId(), Output: &nodev1.WorkloadOutput{}})
		}
		read := func(workload string) error {
			_, err := r.ReadOutput(t.Context(), request(node, workload))
			return err
		}
		const most = 16384
		for n := range most {
			if n == 1 {
				time.Sleep(500 * time.Millisecond) // the bubble's clock
			}
			if err := read(fmt.Sprintf("w%d", n)); err != nil {
				t.Fatal(err)
			}
		}
		err := read("one-more")
		wants(t, "one more than are kept", err, commonv1.Reason_REASON_OVERLOADED)
		if f, ok := fault.As(err); ok && f.RetryAfter != 1500*time.Millisecond {
			t.Errorf("to be asked again in %s, and the first may be read again in 1.5s", f.RetryAfter)
		}
		wants(t, "one that is kept", read("w1"), commonv1.Reason_REASON_RATE_LIMITED)
		time.Sleep(1500 * time.Millisecond) // the bubble's clock
		if err := read("one-more"); err != nil {
			t.Errorf("after the first may be read again: %v", err)
		}
		wants(t, "the next", read("w0"), commonv1.Reason_REASON_OVERLOADED)
		time.Sleep(500 * time.Millisecond) // the bubble's clock
		for _, workload := range []string{"w0", "w1", "another"} {
			if err := read(workload); err != nil {
				t.Errorf("%s, after the others may be read again: %v", workload, err)
			}
		}
	})
}
