package dispatch_test

import (
	"bytes"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode/utf8"

	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/names"
)

func TestUpdatesMoveATaskForwardOnly(t *testing.T) {
	k := newKit(t)
	n := k.node()
	row := k.enqueue(n, ofRun(ids.New()))
	ref := k.lease(n)
	k.delivered(n, ref)
	k.wants(row.TaskID, delivered, 1, 0)
	k.started(n, ref)
	k.wants(row.TaskID, running, 1, 0)
	k.delivered(n, ref)
	k.started(n, ref)
	k.wants(row.TaskID, running, 1, 0)
	k.report(n, func(r *lifecyclev1.NodeReport) {
		r.Progress = []*nodev1.TaskProgress{{Task: ref, Note: "half"}}
	})
	if !k.result(n, ref, succeeded) {
		t.Error("the result is not acknowledged")
	}
	k.wants(row.TaskID, succeeded, 1, 0)
	k.started(n, ref)
	k.wants(row.TaskID, succeeded, 1, 0)
	k.wantHistory(row.TaskID, "queued", "dispatched", "delivered", "running", "running", "succeeded")
	if k.wakes() != 1 {
		t.Errorf("the run was woken %d times", k.wakes())
	}
}

// TestReportsOfOneBatchAreAppliedApart folds delivery, start and result into one commit.
func TestReportsOfOneBatchAreAppliedApart(t *testing.T) {
	k := newKit(t)
	n := k.node()
	row := k.enqueue(n)
	ref := k.lease(n)
	res := k.report(n, func(r *lifecyclev1.NodeReport) {
		r.Delivered, r.Started = []*nodev1.TaskRef{ref}, []*nodev1.TaskStarted{{Task: ref}}
		r.Results = []*nodev1.TaskResult{{Task: ref, State: succeeded}}
	})
	if len(res.GetAcknowledged()) != 1 {
		t.Errorf("acknowledged %v", res.GetAcknowledged())
	}
	k.wantHistory(row.TaskID, "queued", "dispatched", "delivered", "running", "succeeded")
	if v := k.row(row.TaskID).Version; v != 2 {
		t.Errorf("%d versions: the queueing and one report were wanted", v)
	}
}

// TestTransitionsHaveTheSessionThatReportedThem: an agent whose connection was cut sends its result again by its next
// session, before the gate is raised to that one.
func TestTransitionsHaveTheSessionThatReportedThem(t *testing.T) {
	k := newKit(t)
	n := k.node()
	row := k.enqueue(n)
	ref := k.lease(n)
	k.started(n, ref)
	next := *n
	next.generation, next.session = n.generation+1, ids.New()
	if !k.result(&next, ref, succeeded) {
		t.Fatal("the result is not acknowledged")
	}
	want := map[commonv1.TaskState]int64{
		dispatched: n.generation, running: n.generation, succeeded: next.generation,
	}
	for _, tr := range k.transitions(row.TaskID) {
		if epoch, ok := want[tr.GetState()]; ok && tr.GetSessionEpoch() != epoch {
			t.Errorf("%s was reported by session %d, its transition has %d", names.Of(tr.GetState()), epoch,
				tr.GetSessionEpoch())
		}
		delete(want, tr.GetState())
	}
	if len(want) > 0 {
		t.Errorf("no transition to %v", want)
	}
}

// TestSupersededTasksAreCountedOnce: an agent that refuses a task because it has seen a later operation is counted when
// that is written, and not again when it reports that again.
func TestSupersededTasksAreCountedOnce(t *testing.T) {
	k := newKit(t)
	n := k.node()
	row := k.enqueue(n, ofRun(ids.New()))
	ref := k.lease(n)
	for range 2 {
		if !k.result(n, ref, commonv1.TaskState_TASK_STATE_SUPERSEDED) {
			t.Fatal("the result is not acknowledged")
		}
	}
	k.wants(row.TaskID, commonv1.TaskState_TASK_STATE_SUPERSEDED, 1, 0)
	if got := k.superseded.Load(); got != 1 {
		t.Errorf("counted %d times", got)
	}
}

// TestLostAnswersCostNothing sends each report twice, as an agent does whose response was lost after the commit.
func TestLostAnswersCostNothing(t *testing.T) {
	k := newKit(t)
	n := k.node()
	row := k.enqueue(n, ofRun(ids.New()))
	ref := k.lease(n)
	for range 2 {
		k.delivered(n, ref)
		k.started(n, ref)
	}
	for range 3 {
		if !k.result(n, ref, succeeded) {
			t.Fatal("the same result again is not acknowledged")
		}
	}
	// By another session too: the acknowledgement was lost with the stream.
	res := k.ready(n, inFlight(ref, succeeded))
	if len(res.GetAcknowledged()) != 1 {
		t.Errorf("reconcile acknowledged %v", res.GetAcknowledged())
	}
	if !k.result(n, ref, succeeded) {
		t.Error("the same result by the next session is not acknowledged")
	}
	k.wants(row.TaskID, succeeded, 1, 0)
	k.wantHistory(row.TaskID, "queued", "dispatched", "delivered", "running", "succeeded")
	if k.wakes() != 1 {
		t.Errorf("the run was woken %d times", k.wakes())
	}
}

func TestConcurrentReportsOfOneResultHaveOneEffect(t *testing.T) {
	k := newKit(t)
	n := k.node()
	row := k.enqueue(n, ofRun(ids.New()))
	ref := k.lease(n)
	var wg sync.WaitGroup
	for range 12 {
		wg.Go(func() {
			if !k.result(n, ref, succeeded) {
				t.Error("not acknowledged")
			}
		})
	}
	wg.Wait()
	k.wants(row.TaskID, succeeded, 1, 0)
	k.wantHistory(row.TaskID, "queued", "dispatched", "succeeded")
	if k.wakes() != 1 {
		t.Errorf("the run was woken %d times", k.wakes())
	}
}

// TestResultsWithoutAPlaceAreEvidence reports results after the end, of another node, and of a task that does not
// exist.
func TestResultsWithoutAPlaceAreEvidence(t *testing.T) {
	k := newKit(t)
	n, other := k.node(), k.node()
	row := k.enqueue(n, ofRun(ids.New()))
	ref := k.lease(n)
	if !k.result(n, ref, failed) {
		t.Fatal("not acknowledged")
	}
	wakes := k.wakes()
	for range 2 {
		if !k.result(n, ref, succeeded) {
			t.Error("a late result is to be acknowledged, or the agent sends it for ever")
		}
	}
	k.wants(row.TaskID, failed, 1, 1)
	if !k.result(n, &nodev1.TaskRef{TaskId: ids.New(), Attempt: 1}, succeeded) {
		t.Error("a result of something unknown is to be acknowledged")
	}
	if !k.result(other, ref, succeeded) {
		t.Error("a result of another node's task is to be acknowledged")
	}
	k.wants(row.TaskID, failed, 1, 1)
	if k.wakes() != wakes {
		t.Error("a late result woke the run")
	}
	// Reports of the first node about a task of the other one do not change that task.
	mine := k.enqueue(other)
	theirs := k.lease(other)
	k.delivered(n, theirs)
	k.result(n, theirs, succeeded)
	k.wants(mine.TaskID, dispatched, 1, 0)
}

func TestLowerAttemptChangesNothing(t *testing.T) {
	k := newKit(t)
	n := k.node()
	row := k.enqueue(n)
	first := k.lease(n)
	k.delivered(n, first)
	n.ledger = ids.New() // reinstalled: a new ledger, so the task is queued again
	k.ready(n)
	second := k.lease(n)
	if second.GetAttempt() != 2 {
		t.Fatalf("attempt %d", second.GetAttempt())
	}
	k.started(n, first)
	k.wants(row.TaskID, dispatched, 2, 0)
	if !k.result(n, first, succeeded) {
		t.Error("not acknowledged")
	}
	k.wants(row.TaskID, dispatched, 2, 1)
	if !k.result(n, second, succeeded) {
		t.Error("not acknowledged")
	}
	k.wants(row.TaskID, succeeded, 2, 1)
}

// TestShutGateKeepsEvidenceUnacknowledged: a fenced node's result changes nothing, and comes again when it is let back
// in.
func TestShutGateKeepsEvidenceUnacknowledged(t *testing.T) {
	k := newKit(t)
	n := k.node()
	row := k.enqueue(n, ofRun(ids.New()))
	ref := k.lease(n)
	k.started(n, ref)
	k.fence(n, 2, false)
	for range 2 {
		if k.result(n, ref, succeeded) {
			t.Fatal("acknowledged behind a shut gate")
		}
	}
	k.wants(row.TaskID, running, 1, 1)
	if k.wakes() != 0 {
		t.Error("the run was woken")
	}
	k.fence(n, 3, true)
	k.ready(n, inFlight(ref, succeeded))
	if !k.result(n, ref, succeeded) {
		t.Error("not acknowledged")
	}
	k.wants(row.TaskID, succeeded, 1, 1)
}

// TestHostileResults: NUL, broken UTF-8 where the wire lets it through, floods of text, and what is no end of a task.
func TestHostileResults(t *testing.T) {
	k := newKit(t)
	n := k.node()
	big := strings.Repeat("é", 8192)
	cases := []struct {
		name   string
		result *nodev1.TaskResult
		state  commonv1.TaskState
	}{
		{"NUL", &nodev1.TaskResult{State: succeeded, Error: "a\x00b", Output: []byte("x\x00y")}, succeeded},
		{"broken text", &nodev1.TaskResult{State: failed, Error: "a\xff\xfe"}, failed},
		{"long text", &nodev1.TaskResult{State: failed, Error: big}, failed},
		{"large output", &nodev1.TaskResult{State: succeeded, Output: bytes.Repeat([]byte("o"), 256<<10)}, succeeded},
		{"no state", &nodev1.TaskResult{}, failed},
		{"a state that an agent cannot give", &nodev1.TaskResult{State: expired}, failed},
		{"not an end", &nodev1.TaskResult{State: running}, failed},
		{"unknown reason", &nodev1.TaskResult{State: failed, Reason: 9999}, failed},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			row := k.enqueue(n)
			ref := k.lease(n)
			c.result.Task = ref
			res := k.report(n, func(r *lifecyclev1.NodeReport) { r.Results = []*nodev1.TaskResult{c.result} })
			if len(res.GetAcknowledged()) != 1 {
				t.Error("not acknowledged")
			}
			k.wants(row.TaskID, c.state, 1, 0)
			if s := k.row(row.TaskID); !utf8.ValidString(s.Error) || len(s.Error) > 4096 {
				t.Errorf("error of %d bytes", len(s.Error))
			}
			if got := k.history(row.TaskID); len(got) != 3 {
				t.Errorf("history %v", got)
			}
		})
	}
}

// TestReportsOfManyNodesAreOneCommit: shut gates beside open ones, answers in the order asked.
func TestReportsOfManyNodesAreOneCommit(t *testing.T) {
	k := newKit(t)
	var nodes []*node
	var refs []*nodev1.TaskRef
	for i := range 6 {
		n := k.node()
		k.enqueue(n)
		refs = append(refs, k.lease(n))
		if i%3 == 2 {
			k.fence(n, 2, false)
		}
		nodes = append(nodes, n)
	}
	req := &lifecyclev1.ReportTasksRequest{}
	for i, n := range nodes {
		req.Reports = append(req.Reports, &lifecyclev1.NodeReport{
			NodeId: n.id, SessionId: n.session, Generation: n.generation,
			Results: []*nodev1.TaskResult{{Task: refs[i], State: succeeded}},
		})
	}
	res, err := k.tasks.ReportTasks(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	for i, one := range res.GetResults() {
		shut := i%3 == 2
		if one.GetNodeId() != nodes[i].id || (len(one.GetAcknowledged()) == 1) == shut || (one.GetDenial() != nil) != shut {
			t.Errorf("node %d: %v", i, one)
		}
	}
}

// TestACopiedDiskDoesNotSpeakForItsOriginal: two nodes report one attempt in one batch, in either order; the report of
// the task's own node counts.
func TestACopiedDiskDoesNotSpeakForItsOriginal(t *testing.T) {
	for _, copyFirst := range []bool{false, true} {
		k := newKit(t)
		own, twin := k.node(), k.node()
		row := k.enqueue(own)
		ref := k.lease(own)
		word := func(n *node, state commonv1.TaskState) *lifecyclev1.NodeReport {
			return &lifecyclev1.NodeReport{
				NodeId: n.id, SessionId: n.session, Generation: n.generation, LedgerId: own.ledger,
				Results: []*nodev1.TaskResult{{Task: ref, State: state}},
			}
		}
		reports := []*lifecyclev1.NodeReport{word(own, succeeded), word(twin, failed)}
		if copyFirst {
			slices.Reverse(reports)
		}
		if _, err := k.tasks.ReportTasks(t.Context(), &lifecyclev1.ReportTasksRequest{Reports: reports}); err != nil {
			t.Fatal(err)
		}
		k.wants(row.TaskID, succeeded, 1, 0)
	}
}

// TestAResultImpliesTheStart: an agent leaves out the delivery and the start of a task whose result comes at once, and
// the task's history still has both.
func TestAResultImpliesTheStart(t *testing.T) {
	k := newKit(t)
	n := k.node()
	short := k.enqueue(n).TaskID
	end := func(startedAt *timestamppb.Timestamp, state commonv1.TaskState) {
		t.Helper()
		ref := k.lease(n)
		answer := k.report(n, func(r *lifecyclev1.NodeReport) {
			r.Results = []*nodev1.TaskResult{{Task: ref, State: state, StartedAt: startedAt}}
		})
		if len(answer.GetAcknowledged()) != 1 {
			t.Errorf("the result is not acknowledged: %v", answer)
		}
	}
	end(timestamppb.Now(), succeeded)
	k.wantHistory(short, "queued", "dispatched", "delivered", "running", "succeeded")
	refused := k.enqueue(n).TaskID
	end(nil, failed)
	k.wantHistory(refused, "queued", "dispatched", "failed")
}

// TestTheStartThatAResultReportsHasItsTime: a start that only the result reports has the time of its started_at, which
// is of the agent's clock, but not before the lease and not after the result.
func TestTheStartThatAResultReportsHasItsTime(t *testing.T) {
	k := newKit(t)
	n := k.node()
	const early, between, late = -time.Hour, time.Microsecond, time.Hour
	for _, after := range []time.Duration{early, between, late} {
		id := k.enqueue(n).TaskID
		ref := k.lease(n)
		leased := k.row(id).StateAt
		k.report(n, func(r *lifecyclev1.NodeReport) {
			r.Results = []*nodev1.TaskResult{{Task: ref, State: succeeded, StartedAt: timestamppb.New(leased.Add(after))}}
		})
		ended := k.row(id).StateAt
		want := map[time.Duration]time.Time{early: leased, between: leased.Add(between), late: ended}[after]
		for _, tr := range k.transitions(id) {
			switch at := tr.GetAt().AsTime(); tr.GetState() {
			case delivered, running:
				if !at.Equal(want) || tr.GetDetail() != "reported with its result" {
					t.Errorf("%v after the lease: %s %v after it, %q", after, names.Of(tr.GetState()), at.Sub(leased), tr.GetDetail())
				}
			case succeeded:
				if !at.Equal(ended) || tr.GetDetail() != "" {
					t.Errorf("succeeded at %v, not %v, %q", at, ended, tr.GetDetail())
				}
			default:
			}
		}
		k.wantHistory(id, "queued", "dispatched", "delivered", "running", "succeeded")
	}

	// Updates that came by themselves are not recorded as having come with the result, and the times of updates that come
	// together are in order.
	id := k.enqueue(n).TaskID
	ref := k.lease(n)
	k.report(n, func(r *lifecyclev1.NodeReport) {
		r.Delivered = []*nodev1.TaskRef{ref}
		r.Results = []*nodev1.TaskResult{{Task: ref, State: succeeded, StartedAt: timestamppb.New(time.Unix(0, 0))}}
	})
	var last time.Time
	for _, tr := range k.transitions(id) {
		if (tr.GetDetail() != "") != (tr.GetState() == running) {
			t.Errorf("%s: %q", names.Of(tr.GetState()), tr.GetDetail())
		}
		if tr.GetAt().AsTime().Before(last) {
			t.Errorf("%s comes before what was before it", names.Of(tr.GetState()))
		}
		last = tr.GetAt().AsTime()
	}
}
