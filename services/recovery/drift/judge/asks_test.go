package judge_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1/lifecyclev1connect"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/recovery/drift/ask"
)

// fakeRecords queues tasks that collect records as lifecycle does: one for each key of a node.
type fakeRecords struct {
	lifecyclev1connect.DiagnosticsServiceClient

	mu      sync.Mutex
	tasks   map[string]*lifecyclev1.CollectedRecord // by node and key
	asked   int                                     // nodes, in all requests
	refuses commonv1.Reason
	lost    bool                                           // it queues, and its answer is lost
	fails   func(*lifecyclev1.CollectRecordsRequest) error // nil: it does not
}

func (f *fakeRecords) CollectRecords(_ context.Context, req *lifecyclev1.CollectRecordsRequest,
) (*lifecyclev1.CollectRecordsResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.tasks == nil {
		f.tasks = map[string]*lifecyclev1.CollectedRecord{}
	}
	if f.fails != nil {
		if err := f.fails(req); err != nil {
			return nil, err
		}
	}
	out := &lifecyclev1.CollectRecordsResponse{}
	for _, n := range req.GetNodes() {
		f.asked++
		if f.refuses != 0 {
			out.Nodes = append(out.Nodes, &lifecyclev1.CollectedRecord{NodeId: n.GetNodeId(), Refused: f.refuses})
			continue
		}
		key := n.GetNodeId() + "/" + n.GetIdempotencyKey()
		if f.tasks[key] == nil {
			f.tasks[key] = &lifecyclev1.CollectedRecord{
				NodeId: n.GetNodeId(), Task: &lifecyclev1.Task{NodeId: n.GetNodeId(), State: queuedTask},
			}
		}
		out.Nodes = append(out.Nodes, f.tasks[key])
	}
	if f.lost {
		return nil, errors.New("the answer is lost")
	}
	return out, nil
}

// end ends all tasks, with what they bring.
func (f *fakeRecords) end(state commonv1.TaskState, brings ...*commonv1.Diagnostic) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, c := range f.tasks {
		c.Task.State, c.Diagnostics = state, brings
	}
}

func (k *kit) asker(records *fakeRecords) *ask.Asker {
	k.t.Helper()
	a, err := ask.New(ask.Deps{Logger: testkit.Logger(k.t), Pool: k.db.Pool(pg.RoleRecovery), Records: records})
	k.must(err)
	return a
}

// asks makes one round of an asker, and returns for how many nodes it asked.
func (k *kit) asks(a *ask.Asker) int {
	k.t.Helper()
	n, err := a.Once(k.ctx)
	k.must(err)
	return n
}

// waiting returns how many requests there are.
func (k *kit) waiting() int {
	k.t.Helper()
	return k.count(`SELECT count(*) FROM recovery.record_request`)
}

// away has nodes judged silent.
func (k *kit) away(nodes ...*machine) {
	k.t.Helper()
	for _, n := range nodes {
		k.lose(n)
	}
	k.listen(staleAfter + 15*time.Second)
	k.round()
}

// hostEvidence returns the detail of the evidence of a node's host; empty: there is none.
func (k *kit) hostEvidence(n *machine) string {
	k.t.Helper()
	var out string
	k.must(k.db.Pool(pg.RoleRecovery).QueryRow(k.ctx, `SELECT COALESCE(string_agg(e.detail, ', '), '')
		FROM recovery.evidence e WHERE e.node_id = $1 AND e.source = 'host'`, n.id()).Scan(&out))
	return out
}

func (k *kit) diagnostic(code commonv1.DiagnosticCode, ago time.Duration) *commonv1.Diagnostic {
	return &commonv1.Diagnostic{Code: code, Detail: "as it was", ObservedAt: timestamppb.New(k.now().Add(-ago))}
}

// TestAVerdictAsksTheHostOnce checks that a node is not asked while it is away, and that after its return its agent is
// asked once, by any replica and after any number of lost answers. The entries that it returns are evidence of its host
// and make no verdict, and the request is deleted.
func TestAVerdictAsksTheHostOnce(t *testing.T) {
	k := newKit(t)
	n, records := k.up(), &fakeRecords{}
	one, other := k.asker(records), k.asker(records)
	if k.asks(one) != 0 || k.waiting() != 0 {
		t.Fatal("a node that is well is asked")
	}
	k.away(n)
	k.wantReasons(n.id(), agentDown)
	if k.asks(one) != 0 || k.waiting() != 0 {
		t.Fatal("a node that is away is asked")
	}
	k.back(n)
	k.round()
	records.lost = true
	k.asks(one)
	records.lost = false
	if k.asks(other) != 0 {
		t.Fatal("another replica asks at the same time")
	}
	for range 3 {
		k.listen(30 * time.Second)
		if k.asks(other) != 1 || len(records.tasks) != 1 {
			t.Fatalf("%d tasks", len(records.tasks))
		}
	}
	records.end(succeededTask, k.diagnostic(badTLS, staleAfter))
	k.listen(5 * time.Second)
	if k.asks(one) != 1 || k.waiting() != 0 {
		t.Fatalf("%d requests are left", k.waiting())
	}
	if got := k.hostEvidence(n); !strings.Contains(got, "as it was") {
		t.Errorf("the evidence of its host is %q", got)
	}
	k.round()
	k.wantReasons(n.id(), agentDown, unspecified)
	k.listen(time.Minute)
	k.round()
	if before := records.asked; k.asks(one)+k.asks(other) != 0 || records.asked != before {
		t.Error("it is asked again as time passes")
	}
	k.listen(5 * time.Minute)
	k.away(n) // the next verdict is another question
	k.back(n)
	k.round()
	if k.asks(one) != 1 || len(records.tasks) != 2 {
		t.Errorf("%d tasks after two verdicts", len(records.tasks))
	}
}

// TestWhatIsExplainedIsNotAsked checks that an agent whose host has told what happened is not asked, that reasons which
// the control plane sees by itself ask no agent, tasks that expired among them: those that ask may be such tasks; and
// that a reason which holds while its node is connected asks as it begins.
func TestWhatIsExplainedIsNotAsked(t *testing.T) {
	k := newKit(t)
	n := k.up()
	k.away(n)
	k.merge(n, k.record(refused, time.Minute))
	k.round()
	k.back(n)
	k.round()
	k.fail(k.up())
	if k.waiting() != 0 {
		t.Errorf("%d requests for what is known", k.waiting())
	}
	n = k.up()
	k.put(&recoveryv1.Evidence{
		NodeId: n.id(), Part: tasks, Reason: backlog, Source: commonv1.EvidenceSource_EVIDENCE_SOURCE_TASKS,
		ObservedAt: timestamppb.New(k.now()), Detail: "a task expired in the queue",
	})
	k.round()
	if v := k.last(n); v.GetReason() != backlog || k.waiting() != 0 {
		t.Errorf("%d requests for %v", k.waiting(), v)
	}
	k.profiles(1, "one", retiredPhase)
	k.profiles(2, "two", activePhase)
	n = k.reporting()
	n.session.Profile = &commonv1.ProfileFacts{Name: "site", Fingerprint: "one"}
	k.report(n)
	if v := k.last(n); v.GetReason() != profileDrift || k.waiting() != 1 {
		t.Errorf("%d requests for %v", k.waiting(), v)
	}
}

// TestQuestionsAreBounded checks that of many nodes which come back at once no more are asked at a time than there are
// places, over all replicas; that a refused or an expired task frees its place; and that what is not answered ends.
func TestQuestionsAreBounded(t *testing.T) {
	k := newKit(t)
	var nodes []*machine
	for range 20 {
		nodes = append(nodes, k.up())
	}
	k.away(nodes...)
	for _, n := range nodes {
		k.back(n)
	}
	k.round()
	records := &fakeRecords{}
	one, other := k.asker(records), k.asker(records)
	var both sync.WaitGroup
	for _, a := range []*ask.Asker{one, other} {
		both.Go(func() {
			if _, err := a.Once(k.ctx); err != nil {
				t.Error(err)
			}
		})
	}
	both.Wait()
	if len(records.tasks) != 16 {
		t.Fatalf("%d tasks at once", len(records.tasks))
	}
	records.end(expiredTask)
	k.listen(time.Second)
	k.asks(one) // their ends free their places
	if k.asks(one) != 4 || k.waiting() != 4 {
		t.Fatalf("%d tasks, %d requests", len(records.tasks), k.waiting())
	}
	k.listen(6 * time.Minute)
	if k.asks(one) != 0 || k.waiting() != 0 {
		t.Errorf("%d requests without an answer are left", k.waiting())
	}
	n := nodes[0]
	k.away(n)
	k.back(n)
	k.round()
	records.refuses = commonv1.Reason_REASON_NODE_NOT_CONNECTED
	for range 3 {
		if k.asks(one) != 1 || k.count(`SELECT count(*) FROM recovery.record_request WHERE asked_at IS NOT NULL`) != 0 {
			t.Fatal("a refused task has a place")
		}
		k.listen(30 * time.Second)
	}
	k.lose(n)
	if k.asks(one) != 0 {
		t.Error("a node that is away is asked")
	}
	k.pass(2 * time.Hour)
	if k.asks(one) != 0 || k.waiting() != 0 {
		t.Errorf("%d requests after their time", k.waiting())
	}
}
