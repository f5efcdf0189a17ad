package process

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/gpuaas/mesh/agent/runtime/uid"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
)

// written is a workload whose output the test writes itself, through the shim's functions.
type written struct {
	*Runtime
	t    *testing.T
	shim *shim
	dir  string
}

func newWritten(t *testing.T, env map[string]string) *written {
	t.Helper()
	const space, name = "01970000-0000-7000-8000-00000000000a", "app"
	root := t.TempDir()
	dir := filepath.Join(root, "state", space, name)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	s := &shim{dir: dir, spec: spec{WorkspaceID: space, Name: name, Epoch: 1, UID: -1, Env: env}}
	if err := errors.Join(writeFile(dir, fileSpec, s.spec), writeFile(dir, fileDesired, desired{})); err != nil {
		t.Fatal(err)
	}
	uids, err := uid.Open(uid.Config{Dir: filepath.Join(root, "uids"), Disabled: true})
	if err != nil {
		t.Fatal(err)
	}
	r, err := New(Deps{Logger: slog.New(slog.DiscardHandler), UIDs: uids},
		Config{StateDir: filepath.Join(root, "state"), WorkDir: filepath.Join(root, "work"), NoRoot: true})
	if err != nil {
		t.Fatal(err)
	}
	return &written{Runtime: r, t: t, shim: s, dir: dir}
}

// run is a run of the workload that writes a text and exits.
func (w *written) run(run, text string) {
	w.t.Helper()
	w.shim.state = state{Run: w.shim.state.Run, HasExited: w.shim.state.HasExited, Phase: phaseExited}
	out, err := w.shim.openOutput(run)
	if err != nil {
		w.t.Fatal(err)
	}
	_, err = out.WriteString(text)
	w.shim.state.Run, w.shim.state.HasExited = run, true
	if err := errors.Join(err, out.Close(), writeFile(w.dir, fileState, w.shim.state)); err != nil {
		w.t.Fatal(err)
	}
}

// failToStart begins a run and fails where output.json is written, as on a full disk: a name of a temporary file in the
// directory is too long. The other names are cleaned first.
func (w *written) failToStart(run string) {
	w.t.Helper()
	w.shim.dir = w.dir + strings.Repeat("/.", unix.PathMax/2)
	defer func() { w.shim.dir = w.dir }()
	out, err := w.shim.openOutput(run)
	if !errors.Is(err, unix.ENAMETOOLONG) {
		w.t.Fatalf("opened %v: %v", out, err)
	}
}

func (w *written) request(previous bool, from *nodev1.OutputCursor, most int) OutputRequest {
	return OutputRequest{
		WorkspaceID: w.shim.spec.WorkspaceID, Name: w.shim.spec.Name, Previous: previous, From: from,
		Max: most,
	}
}

func (w *written) read(previous bool) *nodev1.WorkloadOutput {
	w.t.Helper()
	out, err := w.Output(w.t.Context(), w.request(previous, nil, 0))
	if err != nil {
		w.t.Fatalf("previous %t: %v", previous, err)
	}
	return out
}

// TestStartsThatFailKeepTheOutput: a start that fails on a full disk, again and again, loses no output of the last run;
// and output that is read meanwhile is masked as that run's.
func TestStartsThatFailKeepTheOutput(t *testing.T) {
	w := newWritten(t, map[string]string{"KEY": "first-secret"})
	w.run("run-1", "one: first-secret\n")
	w.shim.spec.Env = map[string]string{"KEY": "second-secret"}
	w.run("run-2", "two: second-secret\n")
	if err := os.WriteFile(filepath.Join(w.dir, fileOutput+formerPiece), []byte("the piece of the second\n"),
		0o600); err != nil {
		t.Fatal(err)
	}
	w.shim.spec.Env = map[string]string{"KEY": "third-secret"}
	for range 3 {
		w.failToStart("run-3")
		if out := w.read(false); out.GetRun() != "run-2" || string(out.GetData()) != "two: ****\n" || !out.GetEnded() {
			t.Errorf("after a start that failed: %v", out)
		}
		if out, err := w.Output(t.Context(), w.request(true, nil, 0)); err == nil {
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
	w := newWritten(t, nil)
	if err := os.WriteFile(filepath.Join(w.dir, fileOutput), []byte("of an earlier version\n"), 0o600); err != nil {
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
	context.Context //nolint:containedctx // it is one

	asked func()
}

func (c watchedContext) Err() error {
	c.asked()
	return c.Context.Err()
}

// TestOutputIsMaskedWithoutTheLock: the lock that a start waits for is released before output is masked, and nothing is
// masked for a caller that is gone.
func TestOutputIsMaskedWithoutTheLock(t *testing.T) {
	w := newWritten(t, map[string]string{"KEY": "the-secret"})
	w.run("run-1", "the-secret\n")
	free := false
	ctx := watchedContext{t.Context(), func() {
		f, err := os.Open(filepath.Join(w.dir, fileOutputLock))
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = f.Close() }()
		free = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) == nil
	}}
	if out, err := w.Output(ctx, w.request(false, nil, 0)); err != nil || string(out.GetData()) != "****\n" {
		t.Errorf("%v, %v", out, err)
	}
	if !free {
		t.Error("the lock is held until the output is masked")
	}
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	if out, err := w.Output(gone, w.request(false, nil, 0)); !errors.Is(err, context.Canceled) {
		t.Errorf("a caller that is gone: %v, %v", out, err)
	}
}

// TestAPieceInsideOfAValueIsNotTheEnd: a caller that follows a run that has ended, in pieces smaller than a secret in
// it, gets all the output behind the secret.
func TestAPieceInsideOfAValueIsNotTheEnd(t *testing.T) {
	w := newWritten(t, map[string]string{"KEY": strings.Repeat("long-secret", 4)})
	w.run("run-1", "before "+strings.Repeat("long-secret", 4)+" behind")
	w.run("run-2", "next")
	var text strings.Builder
	for cursor, more := (&nodev1.OutputCursor{Run: "run-1"}), true; more; {
		out, err := w.Output(t.Context(), w.request(false, cursor, 8))
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

// TestOnlyWhatTheAgentSetIsShown: a tenant's variable is a secret, whatever its name begins with.
func TestOnlyWhatTheAgentSetIsShown(t *testing.T) {
	t.Parallel()
	sp := spec{
		WorkspaceID: "the-workspace", Name: "the-workload", Epoch: 1234, Ports: []port{{Name: "web-ui", Port: 18080}},
		Env: map[string]string{
			"PATH": "/usr/bin", "HOME": "/home/it", "CUDA_VISIBLE_DEVICES": "GPU-1,GPU-2",
			"GPUAAS_WORKSPACE_ID": "the-workspace", "GPUAAS_WORKLOAD": "the-workload", "GPUAAS_EPOCH": "1234", "PORT": "18080",
			"PORT_WEB_UI": "18080", "PORT_API_TOKEN": "token-of-a-port", "PORT_ADMIN": "18081",
			"GPUAAS_API_TOKEN": "token-of-the-platform", "URL": "postgresql://role:pass+word@host/db", "SHORT": "abc",
		},
	}
	want := []string{
		"token-of-the-platform", "18081", "token-of-a-port", "postgresql://role:pass+word@host/db",
		"pass+word", "pass%2Bword",
	}
	if got := secretsOf(sp); !slices.Equal(got, want) {
		t.Errorf("the secrets are %q, want %q", got, want)
	}
	sp.Ports = nil
	if got := secretsOf(sp); !slices.Contains(got, "18080") {
		t.Errorf("the secrets are %q, without PORT, which the tenant has set", got)
	}
}

// TestNothingIsCutThatCannotBeRecorded: an output that has grown too large stays whole until the place of the cut can
// be written to output.json.
func TestNothingIsCutThatCannotBeRecorded(t *testing.T) {
	w := newWritten(t, nil)
	w.shim.spec.LogBytes = 16
	text := strings.Repeat("0123456789", 4)
	w.run("01970000-0000-7000-8000-000000000001", text)
	path := filepath.Join(w.dir, fileOutput)
	w.shim.dir = w.dir + strings.Repeat("/.", unix.PathMax/2)
	w.shim.rotate()
	w.shim.dir = w.dir
	if got, err := os.ReadFile(path); err != nil || string(got) != text || sizeOf(path+formerPiece) != 0 ||
		sizeOf(path+formerPiece+nextPiece) != 0 {
		t.Errorf("the output is %q, %v; pieces of %d and %d bytes", got, err, sizeOf(path+formerPiece),
			sizeOf(path+formerPiece+nextPiece))
	}
	w.shim.rotate()
	var info outputInfo
	if _, err := readFile(w.dir, fileOutputInfo, &info); err != nil || info.Cut != 41 || info.PieceAt != 24 ||
		sizeOf(path) != 0 {
		t.Errorf("%+v, %v; %d bytes are left", info, err, sizeOf(path))
	}
	if got, err := os.ReadFile(path + formerPiece); err != nil || string(got) != text[24:] {
		t.Errorf("the piece is %q, %v", got, err)
	}
}
