package ledger_test

import (
	"errors"
	"path/filepath"
	"testing"

	"github.com/gpuaas/mesh/agent/ledger"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/testkit"
)

func openAs(t *testing.T, path, nodeID string) *ledger.Ledger {
	t.Helper()
	testkit.IO(t)
	l, err := ledger.Open(ledger.Config{Path: path, NodeID: nodeID})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return l
}

func closed(t *testing.T, l *ledger.Ledger) {
	t.Helper()
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
}

// A machine imaged from another has its ledger: as another node it begins a new one, and the old one is kept whole.
func TestALedgerBelongsToOneNode(t *testing.T) {
	path, first, second := filepath.Join(t.TempDir(), "l"), ids.New(), ids.New()
	l := openAs(t, path, "")
	id := l.ID()
	if l.NodeID() != "" {
		t.Errorf("a ledger that was opened for no node is %s's", l.NodeID())
	}
	closed(t, l)

	l = openAs(t, path, first)
	if l.ID() != id || l.NodeID() != first || l.MovedAside() != "" {
		t.Fatalf("bound: id %s, was %s; node %s; moved to %q", l.ID(), id, l.NodeID(), l.MovedAside())
	}
	begun, done := task(deploy, ids.New(), 3, 7), task(deploy, ids.New(), 1, 1)
	begun.Start, done.Start = true, true
	mustDeliver(t, l, begun, done)
	if _, err := l.Finish(t.Context(), done.Key, commonv1.TaskState_TASK_STATE_SUCCEEDED, []byte("result")); err != nil {
		t.Fatal(err)
	}
	closed(t, l)

	l = openAs(t, path, first) // its own node finds all of it
	if l.ID() != id || len(l.Unfinished()) != 1 || len(l.Unacked()) != 1 {
		t.Fatalf("again: id %s, %d unfinished, %d unacknowledged", l.ID(), len(l.Unfinished()), len(l.Unacked()))
	}
	closed(t, l)

	l = openAs(t, path, second)
	if l.ID() == id || l.NodeID() != second || l.Foreign() != first || l.MovedAside() == "" {
		t.Fatalf("another node: id %s, was %s; node %s; foreign %q; moved to %q", l.ID(), id, l.NodeID(), l.Foreign(),
			l.MovedAside())
	}
	if n := len(l.InFlight(0)); n != 0 {
		t.Errorf("it speaks of %d tasks of the other node", n)
	}
	if epoch, opSeq, err := l.Fence(begun.WorkspaceID); err != nil || epoch != 0 || opSeq != 0 {
		t.Errorf("it holds a fence of the other node: %d, %d, %v", epoch, opSeq, err)
	}
	aside, anew := l.MovedAside(), l.ID()
	closed(t, l)

	if l = openAs(t, path, second); l.ID() != anew || l.MovedAside() != "" {
		t.Errorf("the new ledger was replaced again: id %s, was %s", l.ID(), anew)
	}
	old := openAs(t, aside, first)
	if old.ID() != id || len(old.Unfinished()) != 1 || len(old.Unacked()) != 1 {
		t.Errorf("what was set aside: id %s, %d unfinished, %d unacknowledged", old.ID(), len(old.Unfinished()),
			len(old.Unacked()))
	}
}

// The node's id becomes part of a file's name.
func TestANodeIDIsChecked(t *testing.T) {
	testkit.IO(t)
	path := filepath.Join(t.TempDir(), "l")
	if l, err := ledger.Open(ledger.Config{Path: path, NodeID: "../elsewhere"}); err == nil {
		t.Errorf("it was taken (%v)", l.Close())
	}
	openAs(t, path, ids.New()) // the file is not locked
}

func TestAbandoned(t *testing.T) {
	path := filepath.Join(t.TempDir(), "l")
	l := openAs(t, path, "")
	foreign, own := task(deploy, ids.New(), 1, 1), task(deploy, ids.New(), 1, 1)
	mustDeliver(t, l, foreign, own)
	for range 2 { // the second finds no entry, and that is no error
		if err := l.Abandon(t.Context(), foreign.Key); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 {
		if got := l.InFlight(0); len(got) != 1 || got[0].GetTaskId() != own.Key.TaskID {
			t.Errorf("in flight: %v", got)
		}
		if _, known, err := l.Get(foreign.Key); known || err != nil {
			t.Errorf("it is known still (%v)", err)
		}
		kept, err := l.Abandoned()
		if err != nil || len(kept) != 1 || kept[0].Key != foreign.Key ||
			string(kept[0].Envelope) != string(foreign.Envelope) {
			t.Errorf("kept %v, %v", kept, err)
		}
		if _, err := l.Start(t.Context(), foreign.Key); !errors.Is(err, ledger.ErrUnknown) {
			t.Errorf("started: %v", err)
		}
		closed(t, l)
		l = openAs(t, path, "")
	}
}
