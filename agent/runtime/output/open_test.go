package output

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/gpuaas/mesh/agent/runtime/jsonfile"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
)

// written is a workload whose output the test writes itself, as its shim does.
type written struct {
	Reader
	t     *testing.T
	shim  *Recorder
	dir   string
	state State
}

func newWritten(t *testing.T, masked ...string) *written {
	t.Helper()
	dir := t.TempDir()
	return &written{t: t, shim: &Recorder{Dir: dir, Masked: masked}, dir: dir, state: State{Stopped: true}}
}

// run is a run of the workload that writes a text and exits.
func (w *written) run(run, text string) {
	w.t.Helper()
	out, err := w.shim.Open(run, w.exit())
	if err != nil {
		w.t.Fatal(err)
	}
	_, err = out.WriteString(text)
	w.state.Run, w.state.HasExited = run, true
	if err := errors.Join(err, out.Close()); err != nil {
		w.t.Fatal(err)
	}
}

func (w *written) exit() Exit {
	return Exit{Run: w.state.Run, HasExited: w.state.HasExited, Code: w.state.ExitCode}
}

// failToStart begins a run and fails where output.json is written, as on a full disk: a name of a temporary file in the
// directory is too long. The other names are cleaned first.
func (w *written) failToStart(run string) {
	w.t.Helper()
	w.shim.Dir = w.dir + strings.Repeat("/.", unix.PathMax/2)
	defer func() { w.shim.Dir = w.dir }()
	out, err := w.shim.Open(run, w.exit())
	if !errors.Is(err, unix.ENAMETOOLONG) {
		w.t.Fatalf("opened %v: %v", out, err)
	}
}

// piece reads the output as the agent does.
func (w *written) piece(ctx context.Context, previous bool, from *nodev1.OutputCursor,
	most int) (*nodev1.WorkloadOutput,
	error,
) {
	source := Source{Name: "app", Dir: w.dir, Masked: w.shim.Masked, State: func() State { return w.state }}
	return w.Read(ctx, source, Request{Previous: previous, From: from, Max: most})
}

func (w *written) read(previous bool) *nodev1.WorkloadOutput {
	w.t.Helper()
	out, err := w.piece(w.t.Context(), previous, nil, 0)
	if err != nil {
		w.t.Fatalf("previous %t: %v", previous, err)
	}
	return out
}

// TestStartsThatFailKeepTheOutput: a start that fails on a full disk, again and again, loses no output of the last run;
// and output that is read meanwhile is masked as that run's.
func TestStartsThatFailKeepTheOutput(t *testing.T) {
	w := newWritten(t, "first-secret")
	w.run("run-1", "one: first-secret\n")
	w.shim.Masked = []string{"second-secret"}
	w.run("run-2", "two: second-secret\n")
	if err := os.WriteFile(filepath.Join(w.dir, filePresent+formerPiece), []byte("the piece of the second\n"),
		0o600); err != nil {
		t.Fatal(err)
	}
	w.shim.Masked = []string{"third-secret"}
	for range 3 {
		w.failToStart("run-3")
		if out := w.read(false); out.GetRun() != "run-2" || string(out.GetData()) != "two: ****\n" || !out.GetEnded() {
			t.Errorf("after a start that failed: %v", out)
		}
		if out, err := w.piece(t.Context(), true, nil, 0); err == nil {
			t.Errorf("the run before the last, of which a start that failed has left nothing: %v", out)
		}
	}
	w.run("run-3", "three: third-secret\n")
	if out := w.read(true); out.GetRun() != "run-2" || string(out.GetData()) != "two: ****\n" || !out.GetEnded() {
		t.Errorf("the previous run: %v", out)
	}
	if out := w.read(false); out.GetRun() != "run-3" || string(out.GetData()) != "three: ****\n" {
		t.Errorf("the present run: %v", out)
	}
	if data, err := os.ReadFile(filepath.Join(w.dir,
		filePrevious+formerPiece)); string(data) != "the piece of the second\n" {
		t.Errorf("the former piece of the previous run: %q, %v", data, err)
	}
}

// TestAStartThatFailsKeepsTheOutputOfAnEarlierVersion: files whose inodes are not recorded are kept as well.
func TestAStartThatFailsKeepsTheOutputOfAnEarlierVersion(t *testing.T) {
	w := newWritten(t)
	if err := os.WriteFile(filepath.Join(w.dir, filePresent), []byte("of an earlier version\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		w.failToStart("run-1")
	}
	w.run("run-1", "present\n")
	if out := w.read(true); string(out.GetData()) != "of an earlier version\n" {
		t.Errorf("the previous run: %v", out)
	}
}

// watchedContext calls a function at every call that checks whether the context has ended.
type watchedContext struct {
	context.Context

	asked func()
}

func (c watchedContext) Err() error {
	c.asked()
	return c.Context.Err()
}

// TestOutputIsMaskedWithoutTheLock: the lock that a start waits for is released before output is masked, and nothing is
// masked for a caller that is gone.
func TestOutputIsMaskedWithoutTheLock(t *testing.T) {
	w := newWritten(t, "the-secret")
	w.run("run-1", "the-secret\n")
	free := false
	ctx := watchedContext{t.Context(), func() {
		f, err := os.Open(filepath.Join(w.dir, fileLock))
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = f.Close() }()
		free = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) == nil
	}}
	if out, err := w.piece(ctx, false, nil, 0); err != nil || string(out.GetData()) != "****\n" {
		t.Errorf("%v, %v", out, err)
	}
	if !free {
		t.Error("the lock is held until the output is masked")
	}
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	if out, err := w.piece(gone, false, nil, 0); !errors.Is(err, context.Canceled) {
		t.Errorf("a caller that is gone: %v, %v", out, err)
	}
}

// TestAPieceInsideOfAValueIsNotTheEnd: a caller that follows a run that has ended, in pieces smaller than a secret in
// it, gets all the output behind the secret.
func TestAPieceInsideOfAValueIsNotTheEnd(t *testing.T) {
	w := newWritten(t, strings.Repeat("long-secret", 4))
	w.run("run-1", "before "+strings.Repeat("long-secret", 4)+" behind")
	w.run("run-2", "next")
	var text strings.Builder
	for cursor, more := (&nodev1.OutputCursor{Run: "run-1"}), true; more; {
		out, err := w.piece(t.Context(), false, cursor, 8)
		if err != nil {
			t.Fatal(err)
		}
		text.Write(out.GetData())
		cursor, more = out.GetNext(), out.GetMore()
	}
	if text.String() != "before **** behindnext" {
		t.Errorf("%q", text.String())
	}
}

// TestNothingIsCutThatCannotBeRecorded: an output that has grown too large stays whole until the place of the cut can
// be written to output.json.
func TestNothingIsCutThatCannotBeRecorded(t *testing.T) {
	w := newWritten(t)
	w.shim.Limit = 16
	text := strings.Repeat("0123456789", 4)
	w.run("01970000-0000-7000-8000-000000000001", text)
	path := filepath.Join(w.dir, filePresent)
	w.shim.Dir = w.dir + strings.Repeat("/.", unix.PathMax/2)
	w.shim.Rotate()
	w.shim.Dir = w.dir
	if got, err := os.ReadFile(path); err != nil || string(got) != text || sizeOf(path+formerPiece) != 0 ||
		sizeOf(path+formerPiece+nextPiece) != 0 {
		t.Errorf("the output is %q, %v; pieces of %d and %d bytes", got, err, sizeOf(path+formerPiece),
			sizeOf(path+formerPiece+nextPiece))
	}
	w.shim.Rotate()
	var info contents
	if _, err := jsonfile.Read(w.dir, InfoFile, &info); err != nil || info.Cut != 41 || info.PieceAt != 24 ||
		sizeOf(path) != 0 {
		t.Errorf("%+v, %v; %d bytes are left", info, err, sizeOf(path))
	}
	if got, err := os.ReadFile(path + formerPiece); err != nil || string(got) != text[24:] {
		t.Errorf("the piece is %q, %v", got, err)
	}
}
