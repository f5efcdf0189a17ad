package judge_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"math/big"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
)

const (
	queuedTask    = commonv1.TaskState_TASK_STATE_QUEUED
	succeededTask = commonv1.TaskState_TASK_STATE_SUCCEEDED
	expiredTask   = commonv1.TaskState_TASK_STATE_EXPIRED
)

// fakeLifecycle queues probes as lifecycle does: one for each key of a node.
type fakeLifecycle struct {
	clock func() time.Time

	mu      sync.Mutex
	tasks   map[string]*lifecyclev1.Task // by node and key
	last    map[string]*lifecyclev1.Task // by node
	asked   int
	expired int32 // of each node
	refuses commonv1.Reason
	lost    bool // it queues, and its answer is lost
}

func (f *fakeLifecycle) ProbeNodes(_ context.Context, req *lifecyclev1.ProbeNodesRequest,
) (*lifecyclev1.ProbeNodesResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.tasks == nil {
		f.tasks, f.last = map[string]*lifecyclev1.Task{}, map[string]*lifecyclev1.Task{}
	}
	now := timestamppb.New(f.clock())
	out := &lifecyclev1.ProbeNodesResponse{CheckedAt: now}
	for _, n := range req.GetNodes() {
		f.asked++
		key := n.GetNodeId() + "/" + n.GetIdempotencyKey()
		if f.refuses == 0 && f.tasks[key] == nil {
			f.tasks[key] = &lifecyclev1.Task{NodeId: n.GetNodeId(), State: queuedTask, StateAt: now}
			f.last[n.GetNodeId()] = f.tasks[key]
		}
		out.Nodes = append(out.Nodes, &lifecyclev1.NodeProbed{
			NodeId: n.GetNodeId(), Task: f.tasks[key], Refused: f.refuses, ExpiredCurrent: f.expired,
			OldestExpiredAt: now,
		})
	}
	if f.lost {
		return nil, fault.New(commonv1.Reason_REASON_UNAVAILABLE, codes.Unavailable.String())
	}
	return out, nil
}

// end ends the last probe of a node.
func (f *fakeLifecycle) end(t *testing.T, n *machine, state commonv1.TaskState) {
	t.Helper()
	f.mu.Lock()
	defer f.mu.Unlock()
	last := f.last[n.id()]
	if last == nil {
		t.Fatal("no probe was queued")
	}
	last.State, last.SessionEpoch, last.StateAt = state, n.session.GetGeneration(), timestamppb.New(f.clock())
}

// age makes the last probe of a node older than it is.
func (f *fakeLifecycle) age(n *machine, by time.Duration) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.last[n.id()].StateAt = timestamppb.New(f.last[n.id()].GetStateAt().AsTime().Add(-by))
}

// queued returns how many probes were queued.
func (f *fakeLifecycle) queued() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.tasks)
}

func newRoot(t *testing.T) *x509.Certificate {
	t.Helper()
	cert, _ := newAuthority(t, nil, nil)
	return cert
}

// newAuthority returns a certificate that may sign others, and its key; signed by another one, or by itself.
func newAuthority(t *testing.T, by *x509.Certificate, byKey *ecdsa.PrivateKey) (*x509.Certificate, *ecdsa.PrivateKey) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "nodes"}, IsCA: true, BasicConstraintsValid: true,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(240 * time.Hour), KeyUsage: x509.KeyUsageCertSign,
	}
	if by == nil {
		by, byKey = template, key
	} else {
		template.Subject.CommonName = "signed"
	}
	der, err := x509.CreateCertificate(rand.Reader, template, by, key.Public(), byKey)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return cert, key
}

// probe has a judge ask for probes, and returns for how many nodes it did.
func (k *kit) probe() int {
	k.t.Helper()
	asked, _, err := k.judge.ProbeOnce(k.ctx)
	k.must(err)
	return asked
}

// fail has a reason concluded about a node, and ended.
func (k *kit) fail(n *machine) {
	k.t.Helper()
	k.enter(n, heldState, "")
	k.round()
	k.enter(n, activeState, "")
	k.round()
}

// recover proves that a node of which a reason has ended is healthy.
func (k *kit) recover(n *machine) {
	k.t.Helper()
	if asked := k.probe(); asked != 1 {
		k.t.Fatalf("asked for %d nodes", asked)
	}
	k.lifecycle.end(k.t, n, succeededTask)
	k.pass(time.Second)
	k.beat()
	k.probe()
	k.round()
	if v := k.last(n); v.GetHealthySince() == nil {
		k.t.Fatalf("not healthy: %v", v.GetChecklist())
	}
}

// last returns the last verdict on a node; nil if there is none.
func (k *kit) last(n *machine) *recoveryv1.NodeVerdict {
	k.t.Helper()
	list := k.verdicts(n.id())
	if len(list) == 0 {
		return nil
	}
	return list[len(list)-1]
}

// absent returns the checks of a verdict that are not present.
func absent(v *recoveryv1.NodeVerdict) []recoveryv1.HealthCheck {
	var out []recoveryv1.HealthCheck
	for _, item := range v.GetChecklist() {
		if !item.GetPresent() {
			out = append(out, item.GetCheck())
		}
	}
	return out
}
