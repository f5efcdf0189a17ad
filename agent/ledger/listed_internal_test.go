package ledger

import (
	"path/filepath"
	"testing"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/testkit"
)

// TestWhatIsInTheFileIsListedOnceItIsKnown: the last sync of a commit failed but its pages were written, so that the
// entry is in the file and in no list. The next offer of the task must list it, or Hello would never name it.
func TestWhatIsInTheFileIsListedOnceItIsKnown(t *testing.T) {
	testkit.IO(t)
	l, err := Open(Config{Path: filepath.Join(t.TempDir(), "ledger")})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	d := Delivery{
		Key: Key{TaskID: "t", Attempt: 1}, Type: commonv1.TaskType_TASK_TYPE_PROBE_NOOP,
		ExpiresAt: time.Now().Add(time.Minute),
	}
	finished := Delivery{Key: Key{TaskID: "u", Attempt: 1}, Type: d.Type, ExpiresAt: d.ExpiresAt}
	err = l.store.commit(func(tx *transaction) error {
		if _, err := deliver(tx, &d, time.Now()); err != nil {
			return err
		}
		put(tx, &Entry{Delivery: finished, State: StateFinished})
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	out, err := l.Deliver(t.Context(), d, finished)
	if err != nil || !out[0].Known || !out[1].Known {
		t.Fatalf("delivered %v, %v", out, err)
	}
	if got := l.Unfinished(); len(got) != 1 || got[0].Key != d.Key {
		t.Errorf("unfinished: %v", got)
	}
	// An acknowledged result leaves the list before the acknowledgement is in the file; an offer that comes then does not
	// bring it back.
	if got := l.Unacked(); len(got) != 0 {
		t.Errorf("unacknowledged: %v", got)
	}
}
