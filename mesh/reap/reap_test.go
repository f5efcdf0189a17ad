package reap_test

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/mesh/reap"
)

// program stands in for the agent: a shell under its name.
const program = "reap-test-agent"

func TestEndEndsAgentsBelowTheDirectoryOnly(t *testing.T) {
	testkit.IO(t)
	ctx := testkit.Context(t)
	bin := filepath.Join(t.TempDir(), program)
	shell, err := os.ReadFile("/bin/sh")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(bin, shell, 0o700); err != nil { // it is a program
		t.Fatal(err)
	}
	script := filepath.Join(t.TempDir(), "run")
	// It ignores the first signal, and its child names nothing.
	if err := os.WriteFile(script, []byte(`trap "" TERM; env -i sleep 1000 & env -i sleep 1000`), 0o600); err != nil {
		t.Fatal(err)
	}
	start := func(name string, args ...string) (*exec.Cmd, chan error) {
		cmd := exec.CommandContext(ctx, name, args...)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		done := make(chan error, 1)
		go func() { done <- cmd.Wait() }()
		return cmd, done
	}
	ours, theirs := t.TempDir(), t.TempDir()
	_, mine := start(bin, script, "--state-dir", filepath.Join(ours, "n1", "state"))
	_, others := start(bin, script, "--state-dir="+theirs)
	testkit.Eventually(t, testkit.Patience, func() error {
		for _, dir := range []string{ours, theirs} {
			procs, err := reap.Under(dir, program)
			if err != nil {
				return err
			}
			if len(procs) < 3 {
				return errors.New("not all have begun")
			}
		}
		return nil
	})
	n, err := reap.End(ctx, ours, program, 100*time.Millisecond)
	if err != nil || n < 3 {
		t.Errorf("ended %d, %v", n, err)
	}
	<-mine
	select {
	case err := <-others:
		t.Errorf("another's agent ended: %v", err)
	default:
	}
	if n, err := reap.End(ctx, ours, program, 0); n != 0 || err != nil {
		t.Errorf("a second time: %d, %v", n, err)
	}
	if n, err := reap.End(ctx, theirs, program, 0); n < 3 || err != nil {
		t.Errorf("the other directory: %d, %v", n, err)
	}
	<-others
}
