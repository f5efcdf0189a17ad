package process

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/testkit"
)

// keep runs Keep until the test ends.
func keep(t *testing.T, d *Driver) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); _ = d.Keep(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
}

// wake starts the agent of an instance outside of the driver, as a host does on which it was restored, and a process
// that carries its marker alone.
func wake(t *testing.T, d *Driver, ws string, epoch int64) {
	t.Helper()
	dir := d.instanceDir(ws, epoch)
	// this test binary
	agent := exec.Command(os.Args[0], "run", "--state-dir", filepath.Join(dir, "state"))
	// ended by the driver
	marked := exec.Command("sleep", "3600")
	marked.Env = append(os.Environ(), marker+"="+dir)
	for _, cmd := range []*exec.Cmd{agent, marked} {
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	}
	waitProcs(t, d, ws, epoch, 1, 3)
}

// Keep ends the processes of an epoch that has ended by the launch log, and those of no other.
func TestProcessesOfAnEndedEpochAreEnded(t *testing.T) {
	d := newDriver(t, 4, 4)
	ws := ids.New()
	mustLaunch(t, d, newInstance(ws, 1))
	mustEnd(t, d, ws, 1)
	mustLaunch(t, d, newInstance(ws, 2))
	waitProcs(t, d, ws, 2, 1, 2)
	wake(t, d, ws, 1)
	keep(t, d)
	testkit.Eventually(t, testkit.Patience, func() error {
		if agents, all := running(t, d, ws, 1); all != 0 {
			return fmt.Errorf("%d agents and %d processes of an ended epoch run", agents, all)
		}
		return nil
	})
	testkit.Eventually(t, testkit.Patience, func() error {
		list, err := d.List(t.Context())
		for _, i := range list {
			if i.Epoch == 1 && i.Strays == 3 && !i.EndedAt.IsZero() && i.StraysAt.After(i.EndedAt) {
				return err
			}
		}
		return errors.Join(err, fmt.Errorf("the launch log tells nothing of it: %+v", list))
	})
	if agents, all := running(t, d, ws, 2); agents != 1 || all != 2 {
		t.Errorf("%d agents and %d processes of the present epoch are left", agents, all)
	}
}

// TestAReaderOfAnEndedInstanceIsLeftAlone: a process with its working directory there and no marker belongs to a person
// who reads its files.
func TestAReaderOfAnEndedInstanceIsLeftAlone(t *testing.T) {
	d := newDriver(t, 4, 4)
	ws := ids.New()
	mustLaunch(t, d, newInstance(ws, 1))
	mustEnd(t, d, ws, 1)
	reader := exec.Command("sleep", "3600")
	reader.Dir = filepath.Join(d.instanceDir(ws, 1), "state")
	if err := reader.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = reader.Process.Kill(); _ = reader.Wait() })
	if err := d.endStrays(t.Context()); err != nil {
		t.Fatal(err)
	}
	if startTicks(reader.Process.Pid) == 0 {
		t.Error("it was ended")
	}
}

// TestAnEndDuringAScanIsNoStray: an instance that ends between the scan for strays and the reading of the launch log
// has left nothing behind.
func TestAnEndDuringAScanIsNoStray(t *testing.T) {
	d := newDriver(t, 4, 4)
	ws := ids.New()
	mustLaunch(t, d, newInstance(ws, 1))
	waitProcs(t, d, ws, 1, 1, 2)
	procs, err := scan(d.root(), marked)
	if err != nil || len(procs) != 1 {
		t.Fatalf("found %v, %v", procs, err)
	}
	mustEnd(t, d, ws, 1)
	if err := d.endFound(t.Context(), procs); err != nil {
		t.Fatal(err)
	}
	list, err := d.List(t.Context())
	if err != nil || len(list) != 1 || list[0].Strays != 0 {
		t.Errorf("the launch log has %+v, %v", list, err)
	}
}
