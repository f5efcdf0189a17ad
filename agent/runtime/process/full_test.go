package process_test

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"
	"time"

	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/testkit"
)

const smallDisk = 16 << 20

// A workload that ends while the disk is full has done its work: how it ended is recorded once there is room, and it is
// not run again.
func TestAnExitOnAFullDiskIsKept(t *testing.T) {
	g := newRig(t, testkit.SmallDiskAt(t, host(t), smallDisk), false)
	g.supervise()
	st := g.deploy(sh("job", "trap 'exit 0' USR1; while :; do sleep 0.02; done"))
	shim := g.shimOf("job")
	release := testkit.Fill(t, g.dir)
	dir := filepath.Join(g.dir, "state", workspaceA, "job")
	before := changed(t, dir)
	if err := syscall.Kill(int(st.GetPid()), syscall.SIGUSR1); err != nil {
		t.Fatal(err)
	}
	// The shim has collected it, and has tried to write: an unfinished file came and went.
	testkit.Eventually(t, testkit.Patience, func() error {
		if _, err := os.Stat(filepath.Join("/proc", strconv.Itoa(int(st.GetPid())))); !errors.Is(err, fs.ErrNotExist) {
			return errors.New("the workload is there")
		}
		if changed(t, dir).Equal(before) {
			return errors.New("its end was not written yet")
		}
		return nil
	})
	release()
	end := g.until("job", "ended", func(now *nodev1.WorkloadStatus) bool {
		return now.GetPhase() == phaseExited || now.GetPid() != 0 && now.GetPid() != st.GetPid()
	})
	if end.GetPhase() != phaseExited || end.GetExitCode() != 0 || end.GetRestarts() != 0 {
		t.Errorf("it is %v", end)
	}
	goneSoon(t, shim)
}

func changed(t *testing.T, dir string) time.Time {
	t.Helper()
	info, err := os.Stat(dir)
	if err != nil {
		t.Fatal(err)
	}
	return info.ModTime()
}

// A workload that fails while the disk is full is started again by the same shim once there is room.
func TestARestartOnAFullDiskWaitsForRoom(t *testing.T) {
	g := newRig(t, testkit.SmallDiskAt(t, host(t), smallDisk), false)
	g.supervise()
	st := g.deploy(sh("job", "exec sleep 600"))
	shim := g.shimOf("job")
	release := testkit.Fill(t, g.dir)
	dir := filepath.Join(g.dir, "state", workspaceA, "job")
	before := changed(t, dir)
	kill9(t, int(st.GetPid()))
	testkit.Eventually(t, testkit.Patience, func() error {
		if changed(t, dir).Equal(before) {
			return errors.New("its end was not written yet")
		}
		return nil
	})
	release()
	now := g.until("job", "started again", func(now *nodev1.WorkloadStatus) bool {
		return now.GetPhase() == phaseRunning && now.GetPid() != st.GetPid()
	})
	if now.GetRestarts() != 1 || g.shimOf("job") != shim {
		t.Errorf("it is %v, of shim %d, was of %d", now, g.shimOf("job"), shim)
	}
}

// An instance that was replaced stops its workloads on a full disk too, and they are not brought back.
func TestStopAllNeedsNoRoom(t *testing.T) {
	g := newRig(t, testkit.SmallDiskAt(t, host(t), smallDisk), false)
	g.supervise()
	st := g.deploy(sh("job", "exec sleep 600"))
	release := testkit.Fill(t, g.dir)
	if err := g.StopAll(g.ctx, time.Second); err != nil {
		t.Fatal(err)
	}
	if running(int(st.GetPid())) {
		t.Error("it runs on")
	}
	release()
	// One more workload shows that a round was made since.
	g.deploy(sh("zulu", "exec sleep 600"))
	kill9(t, g.shimOf("zulu"))
	g.until("zulu", "adopted", func(st *nodev1.WorkloadStatus) bool {
		return st.GetAdopted() && running(g.shimOf("zulu"))
	})
	if now := g.status("job"); now.GetPid() != 0 || now.GetPhase() == phaseRunning {
		t.Errorf("it was started again: %v", now)
	}
}
