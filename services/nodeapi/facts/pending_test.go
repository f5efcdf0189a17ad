package facts

import (
	"log/slog"
	"testing"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/ids"
)

// TestAFullWriterTakesNewerObservations: if the most observations that may wait do so, a newer one of the same
// workspace replaces its older one, and one of another workspace is dropped.
func TestAFullWriterTakesNewerObservations(t *testing.T) {
	w := New(Deps{Logger: slog.New(slog.DiscardHandler), Wake: func() {}})
	node, workspace := ids.New(), ids.New()
	w.Observed(node, "", 1, &nodev1.Observation{WorkspaceId: workspace, Epoch: 1})
	for len(w.seen) < observationsPending {
		w.Observed(node, "", 1, &nodev1.Observation{WorkspaceId: ids.New()})
	}
	w.Observed(node, "", 1, &nodev1.Observation{WorkspaceId: workspace, Epoch: 2})
	w.Observed(node, "", 1, &nodev1.Observation{WorkspaceId: ids.New()})
	if epoch := w.seen[kept{workspace, node}].fact.GetEpoch(); epoch != 2 {
		t.Errorf("the observation of epoch %d waits, want that of epoch 2", epoch)
	}
	if n := len(w.seen); n != observationsPending {
		t.Errorf("%d observations wait, want %d", n, observationsPending)
	}
}

// TestAnObservationBesideOneThatIsWrittenIsKept: if a workload goes from one state to another and back while the other
// is being written, the last observation is kept.
func TestAnObservationBesideOneThatIsWrittenIsKept(t *testing.T) {
	w := New(Deps{Logger: slog.New(slog.DiscardHandler), Wake: func() {}})
	node, workspace := ids.New(), ids.New()
	observe := func(epoch int64) {
		w.Observed(node, "", 1, &nodev1.Observation{
			WorkspaceId: workspace, Epoch: epoch,
			Workloads: []*nodev1.WorkloadStatus{{Name: "main"}},
		})
	}
	observe(1)
	w.applyWritten(&written{read: map[string]int64{node: 1}, upToDate: w.takeObserved()})
	w.landed()
	observe(2)
	flying := w.takeObserved()
	observe(1)
	w.applyWritten(&written{upToDate: flying})
	w.landed()
	if left := w.takeObserved(); len(flying) != 1 || len(left) != 1 || left[0].fact.GetEpoch() != 1 {
		t.Errorf("%d were being written, %d wait after them", len(flying), len(left))
	}
	w.landed()
	if observe(1); len(w.seen) != 1 { // the written observation is still that of epoch 2
		t.Errorf("%d observations wait, want the one that differs from what is written", len(w.seen))
	}
}

// Scenario: the end of a session is reported before an older fact of it, from another goroutine. The end is written,
// with the host that the older fact has, and the session is not followed any more.
func TestAnOlderFactDoesNotReplaceANewerOne(t *testing.T) {
	w := New(Deps{Logger: slog.New(slog.DiscardHandler), Wake: func() {}})
	session, node := ids.New(), ids.New()
	fact := func(version int64, state commonv1.SessionState, host *commonv1.HostFacts) {
		w.Session(&nodev1.SessionChanged{
			SessionId: session, NodeId: node, Generation: 1, Version: version, State: state, Host: host,
		}, "")
	}
	fact(2, commonv1.SessionState_SESSION_STATE_CLOSED, nil)
	fact(1, commonv1.SessionState_SESSION_STATE_ADMITTED, &commonv1.HostFacts{MachineId: "machine"})
	facts := w.take()
	if len(facts) != 1 || facts[0].GetVersion() != 2 || facts[0].GetHost().GetMachineId() != "machine" {
		t.Errorf("written is %v, want the end of the session", facts)
	}
	if len(w.observers) != 0 {
		t.Error("a session that has ended is followed")
	}
}

// Scenario: the end of a session is taken, and an older fact of it comes before it is known whether the end was
// written. The older fact is dropped: if the end was not written, the end is written next. In both cases the session is
// not followed any more.
func TestAnOlderFactTakesBackNoEndThatWasTaken(t *testing.T) {
	for name, written := range map[string]bool{"written": true, "not written": false} {
		t.Run(name, func(t *testing.T) {
			w := New(Deps{Logger: slog.New(slog.DiscardHandler), Wake: func() {}})
			session, node := ids.New(), ids.New()
			fact := func(version int64, state commonv1.SessionState) *nodev1.SessionChanged {
				return &nodev1.SessionChanged{
					SessionId: session, NodeId: node, Generation: 1, Version: version, State: state,
				}
			}
			w.Session(fact(1, commonv1.SessionState_SESSION_STATE_ADMITTED), "")
			w.Session(fact(3, commonv1.SessionState_SESSION_STATE_CLOSED), "")
			taken := w.take()
			w.Session(fact(2, commonv1.SessionState_SESSION_STATE_ADMITTED), "")
			if !written {
				w.giveBack(taken)
			}
			switch left := w.take(); {
			case written && len(left) != 0:
				t.Errorf("%v is written after the end", left)
			case !written && (len(left) != 1 || left[0].GetVersion() != 3):
				t.Errorf("%v is written, want the end of the session", left)
			}
			if len(w.observers)+len(w.unread) != 0 {
				t.Error("a session that has ended is followed")
			}
		})
	}
}

// Scenario: of two facts of a session that stands, the newer one is taken first. The older one is written only if it
// has facts of the host that are not older than those which were taken, and a fact that is given back replaces it.
func TestAnOlderFactIsWrittenForItsHostAlone(t *testing.T) {
	w := New(Deps{Logger: slog.New(slog.DiscardHandler), Wake: func() {}})
	session, node := ids.New(), ids.New()
	fact := func(version int64, machine string) {
		f := &nodev1.SessionChanged{
			SessionId: session, NodeId: node, Generation: 1, Version: version,
			State: commonv1.SessionState_SESSION_STATE_ADMITTED,
		}
		if machine != "" {
			f.Host = &commonv1.HostFacts{MachineId: machine}
		}
		w.Session(f, "")
	}
	fact(4, "")
	taken := w.take()
	if fact(3, ""); len(w.take()) != 0 {
		t.Error("an older fact without a host is written")
	}
	fact(2, "second")
	w.giveBack(taken)
	left := w.take()
	if len(left) != 1 || left[0].GetVersion() != 4 || left[0].GetHost().GetMachineId() != "second" {
		t.Errorf("%v is written, want version 4 with the host of the older one", left)
	}
	fact(1, "first")
	if left := w.take(); len(left) != 0 {
		t.Errorf("%v is written, with a host that a newer fact has replaced", left)
	}
	fact(5, "")
	fact(1, "first")
	if left := w.take(); len(left) != 1 || left[0].GetVersion() != 5 || left[0].GetHost() != nil {
		t.Errorf("%v is written, want version 5 without a replaced host", left)
	}
}

// TestVersionsOfFactsAreForgotten checks that the versions of a session's facts outlast those of sessionsKnown other
// sessions, and that no more than twice as many are remembered.
func TestVersionsOfFactsAreForgotten(t *testing.T) {
	w := New(Deps{Logger: slog.New(slog.DiscardHandler), Wake: func() {}})
	fact := func(session string, version int64) {
		w.Session(&nodev1.SessionChanged{SessionId: session, Version: version}, "")
		w.take()
	}
	first := ids.New()
	fact(first, 2)
	for range sessionsKnown {
		fact(ids.New(), 1)
	}
	w.Session(&nodev1.SessionChanged{SessionId: first, Version: 1}, "")
	if left := w.take(); len(left) != 0 {
		t.Errorf("%v is written after a newer one", left)
	}
	for range 3 * sessionsKnown {
		fact(ids.New(), 1)
	}
	if n := len(w.known) + len(w.former); n > 2*sessionsKnown {
		t.Errorf("the versions of %d sessions are remembered", n)
	}
	if _, ok := w.former[first]; ok {
		t.Error("a session of long ago is remembered")
	}
}
