package identity_test

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/recovery/fences"
	"github.com/gpuaas/mesh/services/recovery/identity"
)

// gate is a fake of lifecycle's gate, which keeps the highest fence of each node.
type gate struct {
	mu    sync.Mutex
	fail  int
	calls []*lifecyclev1.ApplyFenceRequest
	high  map[string]int64
}

func (g *gate) ApplyFence(_ context.Context, req *lifecyclev1.ApplyFenceRequest) (*lifecyclev1.ApplyFenceResponse,
	error,
) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.fail > 0 {
		g.fail--
		return nil, fault.New(commonv1.Reason_REASON_UNAVAILABLE, "")
	}
	g.calls = append(g.calls, req)
	g.high[req.GetNodeId()] = max(g.high[req.GetNodeId()], req.GetFenceEpoch())
	return &lifecyclev1.ApplyFenceResponse{FenceEpoch: g.high[req.GetNodeId()], Admitted: req.GetAdmitted()}, nil
}

func (g *gate) last(nodeID string) *lifecyclev1.ApplyFenceRequest {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, call := range slices.Backward(g.calls) {
		if call.GetNodeId() == nodeID {
			return call
		}
	}
	return nil
}

func TestVerbsReachLifecycle(t *testing.T) {
	b := newBench(t)
	n := b.enrolled("one")
	g := &gate{fail: 3, high: map[string]int64{}}
	notifier, err := fences.New(fences.Deps{
		Logger: testkit.Logger(t), Pool: b.pool, Gate: g,
		Notices: b.notices,
	},
		fences.Config{Poll: 20 * time.Millisecond, Retry: 10 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(b.ctx)
	done := make(chan error, 1)
	go func() { done <- notifier.Run(ctx) }()
	defer func() {
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}()
	acknowledged := func(fence int64) {
		t.Helper()
		testkit.Eventually(t, testkit.Patience, func() error {
			if r := b.get(n); r.FenceEpoch != fence || r.Fencing() || r.Notice != r.NoticeAcked {
				return fmt.Errorf("fence %d, acknowledged %d, told %d of %d", r.FenceEpoch, r.FenceAcked, r.NoticeAcked, r.Notice)
			}
			return nil
		})
	}
	acknowledged(1)
	if got := g.last(n.id); !got.GetAdmitted() || got.GetFenceEpoch() != 1 || got.GetNodeInstanceId() != n.instance ||
		got.GetName() != "one" {
		t.Fatalf("activation told %v", got)
	}
	verb := func(v recoveryv1.IdentityVerb, roles ...string) (*identity.Record, error) {
		r, _, err := b.identities.Change(b.ctx, n.id, v, "because", identity.Actor{Subject: "ada", Roles: roles})
		return r, err
	}
	if r, err := verb(recoveryv1.IdentityVerb_IDENTITY_VERB_FENCE, "security"); err != nil || !r.Fencing() {
		t.Fatalf("fence: %v %+v", err, r)
	}
	acknowledged(2)
	if g.last(n.id).GetAdmitted() {
		t.Fatal("a fenced node is admitted")
	}
	if _, err := verb(recoveryv1.IdentityVerb_IDENTITY_VERB_REACTIVATE,
		"operator"); fault.ReasonOf(err) != commonv1.Reason_REASON_PERMISSION_DENIED {
		t.Fatalf("an operator lifts a fence: %v", err)
	}
	if _, err := verb(recoveryv1.IdentityVerb_IDENTITY_VERB_REACTIVATE, "security"); err != nil {
		t.Fatal(err)
	}
	acknowledged(3)
	// Lifecycle has a later fence than this database: the fence of the decision must be raised above it.
	g.mu.Lock()
	g.high[n.id] = 70
	g.mu.Unlock()
	if _, err := verb(recoveryv1.IdentityVerb_IDENTITY_VERB_RETIRE, "operator"); err != nil {
		t.Fatal(err)
	}
	acknowledged(71)
	if got := g.last(n.id); !got.GetRetired() || got.GetAdmitted() {
		t.Fatalf("retire told %v", got)
	}
	if _, err := verb(recoveryv1.IdentityVerb_IDENTITY_VERB_REACTIVATE,
		"security"); fault.ReasonOf(err) != commonv1.Reason_REASON_IDENTITY_RETIRED {
		t.Fatalf("a retired node comes back: %v", err)
	}
	if got := b.open(b.hello(n)).GetDenial().GetReason(); got != commonv1.Reason_REASON_IDENTITY_RETIRED {
		t.Fatalf("a retired node opens: %v", got)
	}
	var events, gaps int
	err = b.pool.QueryRow(b.ctx, `SELECT count(*), count(*) FILTER (WHERE aggregate_version <> n) FROM (
		SELECT aggregate_version, row_number() OVER (ORDER BY seq) AS n FROM events.event
			WHERE aggregate_id = $1) e`, n.id).Scan(&events, &gaps)
	if err != nil || events < 8 || gaps != 0 {
		t.Fatalf("%d events, %d out of order: %v", events, gaps, err)
	}
}
