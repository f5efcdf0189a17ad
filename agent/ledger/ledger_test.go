package ledger_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/gpuaas/mesh/agent/ledger"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/testkit"
)

const (
	deploy    = commonv1.TaskType_TASK_TYPE_WORKLOAD_DEPLOY
	status    = commonv1.TaskType_TASK_TYPE_WORKLOAD_STATUS
	noop      = commonv1.TaskType_TASK_TYPE_PROBE_NOOP
	succeeded = commonv1.TaskState_TASK_STATE_SUCCEEDED
)

func TestMain(m *testing.M) {
	if dir := os.Getenv("LEDGER_TEST_WRITER"); dir != "" {
		os.Exit(writer(dir))
	}
	os.Exit(m.Run())
}

func open(t *testing.T, path string) *ledger.Ledger {
	t.Helper()
	testkit.IO(t)
	l, err := ledger.Open(ledger.Config{Path: path})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return l
}

func task(kind commonv1.TaskType, ws string, epoch, opSeq int64) ledger.Delivery {
	return ledger.Delivery{
		Key: ledger.Key{TaskID: ids.New(), Attempt: 1}, Type: kind, WorkspaceID: ws, Epoch: epoch, OpSeq: opSeq,
		ExpiresAt: time.Now().Add(time.Minute).Truncate(time.Microsecond), Envelope: []byte("envelope"),
		Signature: []byte("signature"), KeyID: "k", CorrelationID: "c", WorkflowID: "w",
	}
}

func mustDeliver(t *testing.T, l *ledger.Ledger, tasks ...ledger.Delivery) []ledger.Outcome {
	t.Helper()
	out, err := l.Deliver(t.Context(), tasks...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func TestLifeOfATask(t *testing.T) {
	path := filepath.Join(t.TempDir(), "ledger.db")
	l := open(t, path)
	d := task(deploy, "ws", 1, 1)
	out := mustDeliver(t, l, d)
	if out[0].Known || out[0].Superseded || out[0].Entry.State != ledger.StateDelivered {
		t.Fatalf("delivered: %+v", out)
	}
	if _, err := l.Start(t.Context(), d.Key); err != nil {
		t.Fatal(err)
	}
	if _, err := l.Start(t.Context(), d.Key); !errors.Is(err, ledger.ErrNotDelivered) {
		t.Errorf("a second start: %v", err)
	}
	if got := l.InFlight(0); len(got) != 1 || got[0].GetState() != commonv1.TaskState_TASK_STATE_RUNNING {
		t.Errorf("in flight: %v", got)
	}
	if _, err := l.Finish(t.Context(), d.Key, succeeded, []byte("first")); err != nil {
		t.Fatal(err)
	}
	if e, err := l.Finish(t.Context(), d.Key, commonv1.TaskState_TASK_STATE_FAILED, []byte("second")); err != nil ||
		string(e.Result) != "first" {
		t.Errorf("a second result: %v, %v", e, err)
	}
	again := mustDeliver(t, l, d)
	if !again[0].Known || string(again[0].Entry.Result) != "first" || again[0].Entry.State != ledger.StateFinished {
		t.Errorf("redelivered: %+v", again)
	}
	id := l.ID()
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	l = open(t, path)
	if l.ID() != id {
		t.Error("the ledger's id changed")
	}
	unacked := l.Unacked()
	if len(unacked) != 1 {
		t.Fatalf("unacked: %v", unacked)
	}
	if diff := cmp.Diff(d, unacked[0].Delivery, cmpopts.EquateApproxTime(time.Microsecond)); diff != "" {
		t.Error(diff)
	}
	if err := l.Ack(t.Context(), d.Key); err != nil {
		t.Fatal(err)
	}
	if got := l.Unacked(); len(got) != 0 {
		t.Errorf("acknowledged, and still sent: %v", got)
	}
	if err := l.Close(); err != nil { // commits the lazy acknowledgement
		t.Fatal(err)
	}
	l = open(t, path)
	if e, ok, err := l.Get(d.Key); err != nil || !ok || e.State != ledger.StateAcked {
		t.Errorf("after reopening: %v, %t, %v", e, ok, err)
	}
	if n, err := l.Prune(t.Context(), d.ExpiresAt.Add(ledger.Retention), 10); n != 0 || err != nil {
		t.Errorf("pruned too early: %d, %v", n, err)
	}
	if n, err := l.Prune(t.Context(), d.ExpiresAt.Add(ledger.Retention+time.Second), 10); n != 1 || err != nil {
		t.Errorf("pruned: %d, %v", n, err)
	}
}

func TestUnacknowledgedResultIsNeverPruned(t *testing.T) {
	l := open(t, filepath.Join(t.TempDir(), "l"))
	d := task(noop, "", 0, 0)
	mustDeliver(t, l, d)
	if _, err := l.Finish(t.Context(), d.Key, succeeded, nil); err != nil {
		t.Fatal(err)
	}
	if n, err := l.Prune(t.Context(), time.Now().AddDate(1, 0, 0), 10); n != 0 || err != nil {
		t.Errorf("pruned %d, %v", n, err)
	}
}

func TestFences(t *testing.T) {
	path := filepath.Join(t.TempDir(), "l")
	l := open(t, path)
	start := func(d ledger.Delivery) error {
		mustDeliver(t, l, d)
		_, err := l.Start(t.Context(), d.Key)
		return err
	}
	early := task(deploy, "a", 2, 3)
	mustDeliver(t, l, early)
	undo := task(deploy, "a", 2, 7)
	if err := start(undo); err != nil {
		t.Fatal(err)
	}
	// Scenario: late-do. It was delivered before the undo started, and must not undo the undo.
	if _, err := l.Start(t.Context(), early.Key); !errors.Is(err, ledger.ErrSuperseded) {
		t.Errorf("a late Do started: %v", err)
	}
	if out := mustDeliver(t, l, task(deploy, "a", 1, 9)); !out[0].Superseded {
		t.Error("a lower epoch was taken")
	}
	if out := mustDeliver(t, l, task(deploy, "a", 2, 6)); !out[0].Superseded {
		t.Error("a lower op_seq was taken")
	}
	if err := start(task(deploy, "a", 2, 7)); err != nil {
		t.Errorf("an equal op_seq: %v", err)
	}
	if err := start(task(status, "a", 1, 1)); err != nil {
		t.Errorf("a status is exempt: %v", err)
	}
	if err := start(task(noop, "", 0, 0)); err != nil {
		t.Errorf("a probe is exempt: %v", err)
	}
	if err := start(task(deploy, "b", 1, 1)); err != nil {
		t.Errorf("another workspace: %v", err)
	}
	// A delivery raises the epoch at once, and op_seq only when it starts.
	mustDeliver(t, l, task(deploy, "a", 5, 50))
	if err := start(task(deploy, "a", 4, 60)); !errors.Is(err, ledger.ErrSuperseded) {
		t.Errorf("an epoch below a delivered one: %v", err)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	l = open(t, path)
	if epoch, opSeq, err := l.Fence("a"); err != nil || epoch != 5 || opSeq != 7 {
		t.Errorf("fence after reopening: %d, %d, %v", epoch, opSeq, err)
	}
	// Start in the commit of the delivery obeys the same rule.
	d := task(deploy, "a", 4, 99)
	d.Start = true
	if out := mustDeliver(t, l, d); !out[0].Superseded || out[0].Entry.State != ledger.StateDelivered {
		t.Errorf("started with its delivery: %+v", out)
	}
	d = task(deploy, "a", 5, 99)
	d.Start = true
	if out := mustDeliver(t, l, d); out[0].Superseded || out[0].Entry.State != ledger.StateStarted {
		t.Errorf("not started with its delivery: %+v", out)
	}
}

// TestConcurrentWritersShareCommits blocks a commit until the other writers wait: the next commit has all of their
// writes.
func TestConcurrentWritersShareCommits(t *testing.T) {
	testkit.IO(t)
	const writers = 64
	begun, release := make(chan struct{}, writers), make(chan struct{})
	l, err := ledger.Open(ledger.Config{Path: filepath.Join(t.TempDir(), "l"), BeforeCommit: func() error {
		begun <- struct{}{}
		<-release
		return nil
	}})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	var wg sync.WaitGroup
	write := func() {
		if _, err := l.Deliver(context.Background(), task(deploy, ids.New(), 1, 1)); err != nil {
			t.Error(err)
		}
	}
	wg.Go(write)
	<-begun
	for range writers - 1 {
		wg.Go(write)
	}
	testkit.Eventually(t, testkit.Patience, func() error {
		if n := l.Queued(); n != writers-1 {
			return fmt.Errorf("%d writes wait", n)
		}
		return nil
	})
	close(release)
	wg.Wait()
	if s := l.Stats(); s.Commits != 2 || s.Writes != writers {
		t.Errorf("%d commits for %d writes: they are not shared", s.Commits, s.Writes)
	}
}

func TestConcurrentWriters(t *testing.T) {
	l := open(t, filepath.Join(t.TempDir(), "l"))
	const writers, rounds = 64, 10
	var wg sync.WaitGroup
	for range writers {
		wg.Go(func() {
			for range rounds {
				d := task(deploy, ids.New(), 1, 1)
				d.Start = true
				if _, err := l.Deliver(context.Background(), d); err != nil {
					t.Error(err)
				}
				if _, err := l.Finish(context.Background(), d.Key, succeeded, []byte("r")); err != nil {
					t.Error(err)
				}
				if err := l.Ack(context.Background(), d.Key); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	s := l.Stats()
	if s.Open != 0 {
		t.Errorf("%d open", s.Open)
	}
	t.Logf("%d writes in %d commits", s.Writes, s.Commits)
}

func TestClosed(t *testing.T) {
	l := open(t, filepath.Join(t.TempDir(), "l"))
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := l.Deliver(t.Context(), task(noop, "", 0, 0)); !errors.Is(err, ledger.ErrClosed) {
		t.Errorf("deliver: %v", err)
	}
	if err := l.Ack(t.Context(), ledger.Key{TaskID: "x", Attempt: 1}); !errors.Is(err, ledger.ErrClosed) {
		t.Errorf("ack: %v", err)
	}
}

func TestInUse(t *testing.T) {
	path := filepath.Join(t.TempDir(), "l")
	open(t, path)
	if _, err := ledger.Open(ledger.Config{Path: path}); !errors.Is(err, ledger.ErrInUse) {
		t.Errorf("a second ledger: %v", err)
	}
}

func TestCorrupt(t *testing.T) {
	testkit.IO(t)
	whole := func(t *testing.T) (string, string, []byte) {
		t.Helper()
		path := filepath.Join(t.TempDir(), "l")
		l, err := ledger.Open(ledger.Config{Path: path})
		if err != nil {
			t.Fatal(err)
		}
		var tasks []ledger.Delivery
		for range 300 {
			tasks = append(tasks, task(deploy, ids.New(), 1, 1))
		}
		mustDeliver(t, l, tasks...)
		id := l.ID()
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
		data, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		return path, id, data
	}
	tests := map[string]func([]byte) []byte{
		"empty":         func([]byte) []byte { return nil },
		"text":          func([]byte) []byte { return []byte(strings.Repeat("not a ledger\n", 4096)) },
		"cut":           func(b []byte) []byte { return b[:12*4096] },
		"cut to a page": func(b []byte) []byte { return b[:4096] },
		"zeroed middle": func(b []byte) []byte { clear(b[3*4096:]); return b },
		"noise": func(b []byte) []byte {
			for i := 2 * 4096; i < len(b); i++ {
				b[i] ^= byte(i*7 + 13)
			}
			return b
		},
		"ones": func(b []byte) []byte {
			for i := 2 * 4096; i < len(b); i++ {
				b[i] = 0xff
			}
			return b
		},
	}
	for name, damage := range tests {
		t.Run(name, func(t *testing.T) {
			path, id, data := whole(t)
			bad := damage(append([]byte(nil), data...))
			if err := os.WriteFile(path, bad, 0o600); err != nil {
				t.Fatal(err)
			}
			_, err := ledger.Open(ledger.Config{Path: path})
			if !errors.Is(err, ledger.ErrCorrupt) {
				t.Fatalf("error %v", err)
			}
			if left, err := os.ReadFile(path); err != nil || string(left) != string(bad) {
				t.Errorf("the file was changed (%v)", err)
			}
			l, err := ledger.Open(ledger.Config{Path: path, MoveCorruptAside: true})
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = l.Close() }()
			if l.ID() == id || l.MovedAside() == "" {
				t.Errorf("id %s, moved to %q", l.ID(), l.MovedAside())
			}
			if left, err := os.ReadFile(l.MovedAside()); err != nil || string(left) != string(bad) {
				t.Errorf("the damaged file was not kept (%v)", err)
			}
		})
	}
}

func say(what string, key any) { _, _ = fmt.Fprintln(os.Stdout, what, key) }

// writer is a process to be killed: it prints a key once the ledger's call has returned that it is stored.
func writer(dir string) int {
	l, err := ledger.Open(ledger.Config{Path: filepath.Join(dir, "l")})
	if err != nil {
		say("error", err)
		return 1
	}
	for range 4 {
		go func() {
			for {
				d := task(deploy, ids.New(), 1, 1)
				if _, err := l.Deliver(context.Background(), d); err != nil {
					return
				}
				say("delivered", d.Key.TaskID)
				if _, err := l.Start(context.Background(), d.Key); err != nil {
					return
				}
				say("started", d.Key.TaskID)
				if _, err := l.Finish(context.Background(), d.Key, succeeded, []byte(d.Key.TaskID)); err != nil {
					return
				}
				say("finished", d.Key.TaskID)
			}
		}()
	}
	select {}
}

// All entries whose writes returned before a kill -9 are there after it, and the id stays.
func TestKilledWriter(t *testing.T) {
	testkit.IO(t)
	dir := t.TempDir()
	id := ""
	said := map[string]ledger.State{}
	for round := range 5 {
		cmd := exec.Command("/proc/self/exe")
		cmd.Env = append(os.Environ(), "LEDGER_TEST_WRITER="+dir)
		out, err := os.Create(filepath.Join(t.TempDir(), "out"))
		if err != nil {
			t.Fatal(err)
		}
		cmd.Stdout, cmd.Stderr = out, out
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		testkit.Eventually(t, testkit.Patience, func() error {
			info, err := out.Stat()
			if err == nil && info.Size() < int64(20_000*(round+1)) {
				err = errors.New("it has not said enough")
			}
			return err
		})
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		_ = cmd.Wait()
		text, err := os.ReadFile(out.Name())
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(text)) {
			what, key, ok := strings.Cut(strings.TrimSuffix(line, "\n"), " ")
			if !ok || len(key) != 36 {
				if what == "error" {
					t.Fatal(line)
				}
				continue // a line that the kill cut
			}
			said[key] = map[string]ledger.State{
				"delivered": ledger.StateDelivered, "started": ledger.StateStarted,
				"finished": ledger.StateFinished,
			}[what]
		}
		l := open(t, filepath.Join(dir, "l"))
		if id != "" && l.ID() != id {
			t.Error("the ledger's id changed")
		}
		id = l.ID()
		for key, want := range said {
			e, ok, err := l.Get(ledger.Key{TaskID: key, Attempt: 1})
			if err != nil || !ok || e.State < want {
				t.Fatalf("task %s: %v, %t, %v; want %v", key, e.State, ok, err, want)
			}
		}
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("%d tasks", len(said))
}
