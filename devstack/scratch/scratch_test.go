package scratch_test

import (
	"bufio"
	"context"
	"errors"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/gpuaas/mesh/devstack/scratch"
)

const childEnv = "GPUAAS_TEST_SCRATCH_CHILD"

// TestMain is also the process that owns a directory and is killed.
func TestMain(m *testing.M) {
	if os.Getenv(childEnv) == "" {
		os.Exit(m.Run())
	}
	d, err := scratch.Make("dev")
	if err != nil {
		panic(err)
	}
	if _, err := os.Stdout.WriteString(d.Path() + "\n"); err != nil {
		panic(err)
	}
	_, _ = os.Stdin.Read(make([]byte, 1)) // until it is killed
}

// own starts a process that owns a directory, and returns the directory and the function that kills the process.
func own(t *testing.T) (string, func()) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), childEnv+"=1")
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	kill := func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		_ = in.Close()
	}
	t.Cleanup(kill)
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(line), kill
}

var quiet = slog.New(slog.DiscardHandler)

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

func TestSweepRemovesTheDirectoriesOfTheDeadAlone(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	mine, err := scratch.Make("dev")
	if err != nil {
		t.Fatal(err)
	}
	alive, _ := own(t)
	dead, kill := own(t)
	if err := os.WriteFile(filepath.Join(dead, "ca.key"), []byte("secret"), 0o600); err != nil {
		t.Fatal(err)
	}
	kill()
	// Directories that look like ours and are not: without a lock file, with an empty one, with another's, a link to a
	// dead one's parent.
	at := func(name string) string { return filepath.Join(os.TempDir(), name) }
	for name, lock := range map[string]string{
		"gpuaas-dev-bare": "-", "gpuaas-dev-empty": "",
		"gpuaas-dev-foreign": "another program's lock file, of some length\n",
	} {
		if err := os.Mkdir(at(name), 0o700); err != nil {
			t.Fatal(err)
		}
		if lock == "-" {
			continue
		}
		if err := os.WriteFile(filepath.Join(at(name), ".scratch.lock"), []byte(lock), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	target, killTarget := own(t)
	killTarget()
	elsewhere := filepath.Join(t.TempDir(), "kept")
	if err := os.Rename(target, elsewhere); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(elsewhere, at("gpuaas-dev-link")); err != nil {
		t.Fatal(err)
	}
	var ended []string
	end := func(_ context.Context, dir string) error { ended = append(ended, dir); return nil }
	if got := scratch.Sweep(t.Context(), quiet, end, "drill"); len(got) != 0 {
		t.Errorf("another kind's sweep removed %v", got)
	}
	if got := scratch.Sweep(t.Context(), quiet, end, "dev"); !slices.Equal(got, []string{dead}) ||
		!slices.Equal(ended, []string{dead}) {
		t.Errorf("swept %v, ended %v, want %s alone", got, ended, dead)
	}
	if exists(dead) {
		t.Error("the dead one's directory stays")
	}
	for _, path := range []string{
		mine.Path(), alive, at("gpuaas-dev-bare"), at("gpuaas-dev-empty"),
		at("gpuaas-dev-foreign"), at("gpuaas-dev-link"), elsewhere,
	} {
		if !exists(path) {
			t.Errorf("%s was removed", path)
		}
	}
	for range 2 {
		if err := mine.Remove(); err != nil {
			t.Error(err)
		}
	}
	if exists(mine.Path()) {
		t.Error("a removed directory stays")
	}
}

// TestADirectoryInWhichSomethingRunsIsKept: a process that cannot be ended keeps its directory, and the next sweep
// tries again.
func TestADirectoryInWhichSomethingRunsIsKept(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	dead, kill := own(t)
	kill()
	refuse := func(context.Context, string) error { return errors.New("a process does not end") }
	if got := scratch.Sweep(t.Context(), quiet, refuse, "dev"); len(got) != 0 || !exists(dead) {
		t.Errorf("swept %v", got)
	}
	if got := scratch.Sweep(t.Context(), quiet, nil, "dev"); len(got) != 1 || exists(dead) {
		t.Errorf("swept %v", got)
	}
}
