package dispatch

import (
	"context"
	"crypto/ed25519"
	"testing"
	"testing/synctest"
	"time"

	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/envelope"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/task"
)

// TestOffersOfOneMessageNameTheirOwnSessions checks that tasks of one node that were leased to two of its sessions are
// each offered to their own.
func TestOffersOfOneMessageNameTheirOwnSessions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, private, err := ed25519.GenerateKey(nil)
		if err != nil {
			t.Fatal(err)
		}
		key := envelope.NewKey(private)
		s := NewServer(Deps{Logger: testkit.Logger(t), Key: key})
		out, node := newOutlet(), ids.New()
		want := map[string]string{}
		for _, session := range []string{"former", "current"} {
			row := task.Row{
				TaskID: ids.New(), Type: "probe.noop", NodeID: node, Attempt: 1, NotBefore: time.Now(),
				ExpiresAt: time.Now().Add(time.Minute),
			}
			task := picked{Row: row, session: session, keyID: key.ID()}
			want[task.TaskID] = session
			out.add(task)
		}
		ctx, cancel := context.WithCancel(t.Context())
		got := map[string]string{}
		s.offerStanding(ctx, out, func(res *lifecyclev1.StreamWorkResponse) error {
			for _, task := range res.GetLease().GetTasks() {
				got[task.GetTask().GetTaskId()] = task.GetSessionId()
			}
			cancel()
			return nil
		})
		for id, session := range want {
			if got[id] != session {
				t.Errorf("the task of session %q is offered to %q", session, got[id])
			}
		}
	})
}

// TestASessionThatNothingIsHeardOfIsUsedNoLonger checks that after a task which was leased as it was queued, and of
// which no report has come, no other is leased so until the node's next lease.
func TestASessionThatNothingIsHeardOfIsUsedNoLonger(t *testing.T) {
	s := standingLeases{underWay: underWay}
	lease := &lifecyclev1.LeaseTasksRequest{Nodes: []*lifecyclev1.NodeLease{{NodeId: "n", SessionId: "s", Generation: 1}}}
	now := time.Now()
	reserve := func(after time.Duration) bool { return s.reserve("n", now.Add(after)).out != nil }
	s.put(newOutlet(), lease, nil)
	if !reserve(0) || reserve(time.Second) {
		t.Fatal("not one task was leased, and then none beside it")
	}
	s.reported([]*lifecyclev1.NodeReport{{NodeId: "n"}})
	if !reserve(time.Second) {
		t.Fatal("none was leased after a report")
	}
	if reserve(time.Second+underWay) || s.has("n") || reserve(time.Hour) {
		t.Error("the session is still used, and nothing was heard of what was leased to it")
	}
	s.put(newOutlet(), lease, nil)
	if !reserve(time.Hour) {
		t.Error("none was leased after the node's next lease")
	}
}

// TestOffersThatWaitAreBounded checks that an outlet keeps no more than its bytes, and has room again for what it gave.
func TestOffersThatWaitAreBounded(t *testing.T) {
	out, large := newOutlet(), picked{payload: make([]byte, 1<<20)}
	for range outletBytes>>20 + 1 {
		out.add(large)
	}
	taken := 0
	for offers := out.take(); len(offers) > 0; offers = out.take() {
		if len(offers) > offerBytes>>20 {
			t.Errorf("%d MiB of offers in one message", len(offers))
		}
		taken += len(offers)
	}
	if taken != outletBytes>>20 || out.bytes != 0 {
		t.Errorf("%d offers of a MiB were kept, and %d bytes after the last", taken, out.bytes)
	}
}
