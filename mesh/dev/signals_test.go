package dev_test

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/mesh/meshtest"
)

// ephemeral is `gpuaas dev --ephemeral`, with a temporary directory of the test's own.
type ephemeral struct {
	t    *testing.T
	tmp  string
	cmd  *exec.Cmd
	out  *text
	errs *text
	over chan error
}

func startEphemeral(t *testing.T, tmp string, flags ...string) *ephemeral {
	t.Helper()
	e := &ephemeral{t: t, tmp: tmp, out: &text{}, errs: &text{}, over: make(chan error, 1)}
	args := append([]string{"dev", "--ephemeral", "--nodes", "1", "--context-name", ""}, flags...)
	e.cmd = exec.CommandContext(testkit.Context(t), filepath.Join(meshtest.Programs(t), "gpuaas"), args...)
	e.cmd.Stdout, e.cmd.Stderr = e.out, e.errs
	e.cmd.Env = append(os.Environ(), "TMPDIR="+tmp)
	e.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := e.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() { e.over <- e.cmd.Wait() }()
	t.Cleanup(func() { // whatever a failed test leaves
		_ = e.cmd.Process.Kill()
		for _, pid := range mentioning(tmp) {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
	})
	return e
}

// until waits for a text on stdout or stderr.
func (e *ephemeral) until(want string) {
	e.t.Helper()
	testkit.Eventually(e.t, 4*time.Minute, func() error {
		if !strings.Contains(e.out.String()+e.errs.String(), want) {
			return fmt.Errorf("no %q yet: %s%s", want, e.out, e.errs)
		}
		return nil
	})
}

// status waits for the end and returns the exit status, -1 for a death by signal.
func (e *ephemeral) status() int {
	e.t.Helper()
	select {
	case err := <-e.over:
		e.over <- err
		if exit, ok := errors.AsType[*exec.ExitError](err); ok {
			return exit.ExitCode()
		}
		if err != nil {
			e.t.Fatal(err)
		}
		return 0
	case <-time.After(3 * time.Minute):
		e.t.Fatalf("the mesh does not end: %s", e.errs)
		return 0
	}
}

// dir is the mesh's directory.
func (e *ephemeral) dir() string {
	e.t.Helper()
	found, err := filepath.Glob(filepath.Join(e.tmp, "gpuaas-dev-*"))
	if err != nil || len(found) != 1 {
		e.t.Fatalf("directories %v, %v", found, err)
	}
	return found[0]
}

// nothingLeft checks that there is no process that mentions the temporary directory, and nothing in it.
func (e *ephemeral) nothingLeft() {
	e.t.Helper()
	for _, pid := range mentioning(e.tmp) {
		// only decorates the failure
		line, _ := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "cmdline"))
		e.t.Errorf("process %d is left: %s", pid, bytes.ReplaceAll(line, []byte{0}, []byte(" ")))
	}
	entries, err := os.ReadDir(e.tmp)
	if err != nil {
		e.t.Fatal(err)
	}
	for _, entry := range entries {
		e.t.Errorf("%s is left", filepath.Join(e.tmp, entry.Name()))
	}
	if e.t.Failed() {
		e.t.Logf("it said: %s%s", e.out, e.errs)
	}
}

// mentioning lists the live processes that stand below a directory or name it in their command line.
func mentioning(dir string) []int {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil
	}
	var out []int
	for _, entry := range entries {
		pid, err := strconv.Atoi(entry.Name())
		if err != nil || pid == os.Getpid() {
			continue
		}
		base := filepath.Join("/proc", entry.Name())
		cwd, _ := os.Readlink(filepath.Join(base, "cwd"))      // it may have ended
		line, _ := os.ReadFile(filepath.Join(base, "cmdline")) // it may have ended
		if strings.HasPrefix(cwd, dir+"/") || bytes.Contains(line, []byte(dir+"/")) {
			out = append(out, pid)
		}
	}
	return out
}

// interrupt does what some supervisors do: it signals the process, and its group.
func (e *ephemeral) interrupt() {
	for _, pid := range []int{e.cmd.Process.Pid, -e.cmd.Process.Pid} {
		_ = syscall.Kill(pid, syscall.SIGINT) // it may have ended
	}
}

// TestRepeatedInterruptsLeaveNothing: interrupts that come at once and 50 ms later change nothing about an orderly end.
func TestRepeatedInterruptsLeaveNothing(t *testing.T) {
	testkit.IO(t)
	e := startEphemeral(t, meshtest.Dir(t))
	e.until("acme/demo → active")
	if len(mentioning(e.dir())) < 4 {
		t.Fatalf("the processes of the mesh are not recognised: %v", mentioning(e.dir()))
	}
	e.interrupt()
	<-time.After(50 * time.Millisecond)
	e.interrupt()
	if code := e.status(); code != 0 {
		t.Errorf("exit status %d", code)
	}
	if n := strings.Count(e.errs.String(), "already stopping"); n != 1 {
		t.Errorf("it is said %d times that it is stopping: %s", n, e.errs)
	}
	e.nothingLeft()
}

// TestALaterInterruptForcesTheEnd: with its Postgres stopped the mesh cannot end in order. An interrupt after the grace
// still ends it, and leaves nothing either.
func TestALaterInterruptForcesTheEnd(t *testing.T) {
	testkit.IO(t)
	e := startEphemeral(t, meshtest.Dir(t))
	e.until("acme/demo → active")
	stopped := 0
	for _, pid := range mentioning(e.dir()) {
		line, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "cmdline"))
		if program, _, _ := bytes.Cut(line, []byte{0}); err == nil && filepath.Base(string(program)) == "postgres" &&
			syscall.Kill(pid, syscall.SIGSTOP) == nil {
			stopped++
		}
	}
	if stopped == 0 {
		t.Fatal("its Postgres is not found")
	}
	began := time.Now()
	e.interrupt()
	again := time.NewTicker(250 * time.Millisecond)
	defer again.Stop()
	for over := false; !over; {
		select {
		case err := <-e.over:
			e.over <- err
			over = true
		case <-again.C:
			e.interrupt()
		case <-time.After(3 * time.Minute):
			t.Fatalf("the mesh does not end: %s", e.errs)
		}
	}
	if code, took := e.status(), time.Since(began); code != 130 || took < 5*time.Second {
		t.Errorf("exit status %d after %s: %s", code, took, e.errs)
	}
	e.nothingLeft()
}

// TestANextStartRemovesWhatADeadOneLeft: a mesh that is killed leaves its instance, the workload and its keys. The
// next start ends and removes them, and nothing of itself.
func TestANextStartRemovesWhatADeadOneLeft(t *testing.T) {
	testkit.IO(t)
	tmp := meshtest.Dir(t)
	dead := startEphemeral(t, tmp)
	dead.until("acme/demo → active")
	left := dead.dir()
	if err := dead.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	if code := dead.status(); code != -1 {
		t.Fatalf("exit status %d", code)
	}
	if len(mentioning(left)) == 0 {
		t.Fatal("nothing of the dead mesh lives on")
	}
	next := startEphemeral(t, tmp, "--no-demo")
	next.until("ready in")
	if _, err := os.Stat(left); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the directory of the dead mesh stays: %v", err)
	}
	if pids := mentioning(left); len(pids) > 0 {
		t.Errorf("of the dead mesh %v live on", pids)
	}
	if _, err := os.Stat(filepath.Join(next.dir(), "material")); err != nil {
		t.Errorf("of the live mesh: %v", err)
	}
	next.interrupt()
	if code := next.status(); code != 0 {
		t.Errorf("exit status %d", code)
	}
	next.nothingLeft()
}
