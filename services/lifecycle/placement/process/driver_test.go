package process

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/placement"
	"github.com/gpuaas/mesh/services/lifecycle/placement/placementtest"
)

// TestMain lets the test binary stand in for the agent: called with `run` it starts a workload in a session of its own,
// as a shim would, and waits.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "run" {
		os.Exit(standIn())
	}
	testkit.Main(m)
}

func standIn() int {
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM)
	work := exec.Command("sleep", "3600") // it outlives the process that starts it, on purpose
	work.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := work.Start(); err != nil {
		return 1
	}
	<-stop
	return 0
}

func newDriver(t *testing.T, maxInstances, maxGPUs int) *Driver {
	t.Helper()
	testkit.IO(t)
	dir := t.TempDir()
	ca := filepath.Join(dir, "ca.pem")
	if err := os.WriteFile(ca, []byte("trust"), 0o600); err != nil {
		t.Fatal(err)
	}
	d, err := New(testkit.Logger(t), Config{
		Dir: filepath.Join(dir, "p"), AgentBinary: os.Args[0], EnrollURL: "https://127.0.0.1:1", APIURL: "127.0.0.1:2",
		CAFile: ca, MaxInstances: maxInstances, MaxGPUs: maxGPUs,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.PowerOff(context.WithoutCancel(t.Context())); err != nil {
			t.Error(err)
		}
	})
	return d
}

func newInstance(ws string, epoch int64) placement.LaunchRequest {
	return placement.LaunchRequest{WorkspaceID: ws, Epoch: epoch, InstanceID: ids.New(), LaunchSecret: "gls_secret"}
}

func mustLaunch(t *testing.T, d *Driver, b placement.LaunchRequest) {
	t.Helper()
	if _, err := d.Launch(t.Context(), b); err != nil {
		t.Fatal(err)
	}
}

func mustEnd(t *testing.T, d *Driver, ws string, epoch int64) {
	t.Helper()
	if err := d.End(t.Context(), ws, epoch); err != nil {
		t.Fatal(err)
	}
}

// running counts the instance's agents, and everything of the instance.
func running(t *testing.T, d *Driver, ws string, epoch int64) (int, int) {
	t.Helper()
	agents := 0
	procs, err := scan(d.root(), everything)
	if err != nil {
		t.Fatal(err)
	}
	mine := procs[instanceID(ws, epoch)]
	for _, p := range mine {
		if p.agent {
			agents++
		}
	}
	return agents, len(mine)
}

func waitProcs(t *testing.T, d *Driver, ws string, epoch int64, agents, all int) {
	t.Helper()
	testkit.Eventually(t, testkit.Patience, func() error {
		if a, n := running(t, d, ws, epoch); a != agents || n != all {
			return fmt.Errorf("%d agents, %d processes", a, n)
		}
		return nil
	})
}

func wantReason(t *testing.T, err error, want commonv1.Reason) {
	t.Helper()
	if got := fault.ReasonOf(err); err == nil || got != want {
		t.Fatalf("got %v (%v), want %v", got, err, want)
	}
}

func TestConformance(t *testing.T) { placementtest.Conform(t, newDriver(t, 16, 16), "") }

func TestLaunchIsIdempotent(t *testing.T) {
	d := newDriver(t, 4, 4)
	ws := ids.New()
	b := newInstance(ws, 1)
	first, err := d.Launch(t.Context(), b)
	if err != nil {
		t.Fatal(err)
	}
	again, err := d.Launch(t.Context(), b)
	if err != nil || again != first {
		t.Fatalf("again: %+v %v, first %+v", again, err, first)
	}
	waitProcs(t, d, ws, 1, 1, 2)
	// Workloads run as other users and must reach their own directories, but not the keys.
	for path, want := range map[string]os.FileMode{
		d.instanceDir(ws, 1):                         0o711,
		filepath.Join(d.instanceDir(ws, 1), "state"): 0o711, filepath.Join(d.instanceDir(ws, 1), "etc"): 0o700,
	} {
		if info, err := os.Stat(path); err != nil || info.Mode().Perm() != want {
			t.Errorf("%s: %v %v, want %v", path, info, err, want)
		}
	}
	list, err := d.List(t.Context())
	if err != nil || len(list) != 1 || list[0].ProviderID != first.ProviderID {
		t.Fatalf("list: %+v %v", list, err)
	}
}

// An instance of the same workspace and epoch with another id was launched by a history that the database lost: it is
// neither adopted nor started again.
func TestAnInstanceOfALostHistoryIsNotAdopted(t *testing.T) {
	d := newDriver(t, 4, 4)
	ws := ids.New()
	mustLaunch(t, d, newInstance(ws, 1))
	waitProcs(t, d, ws, 1, 1, 2)
	_, err := d.Launch(t.Context(), newInstance(ws, 1))
	wantReason(t, err, commonv1.Reason_REASON_INSTANCE_OF_LOST_HISTORY)
	waitProcs(t, d, ws, 1, 1, 2) // it is left running: it may be a tenant's work

	// The intent alone is enough: the instance's files, and perhaps its agent, exist already.
	other := ids.New()
	err = d.launchLog.with(t.Context(), func(_ *content, write func(entry) error) error {
		return write(entry{Op: opIntent, WorkspaceID: other, Epoch: 1, InstanceID: ids.New()})
	})
	if err != nil {
		t.Fatal(err)
	}
	_, err = d.Launch(t.Context(), newInstance(other, 1))
	wantReason(t, err, commonv1.Reason_REASON_INSTANCE_OF_LOST_HISTORY)
	waitProcs(t, d, other, 1, 0, 0)
}

func TestEndEndsEverythingAndLeavesATombstone(t *testing.T) {
	d := newDriver(t, 4, 4)
	ws := ids.New()
	mustLaunch(t, d, newInstance(ws, 1))
	waitProcs(t, d, ws, 1, 1, 2)
	mustEnd(t, d, ws, 1)
	mustEnd(t, d, ws, 1)
	waitProcs(t, d, ws, 1, 0, 0)
	_, err := d.Launch(t.Context(), newInstance(ws, 1))
	wantReason(t, err, commonv1.Reason_REASON_EPOCH_ENDED)
	if _, err := os.Stat(filepath.Join(d.instanceDir(ws, 1), "etc", "node-agent.env")); !errors.Is(err, os.ErrNotExist) {
		t.Fatalf("the box's token was left behind: %v", err)
	}
}

func TestEpochsDoNotOverlap(t *testing.T) {
	d := newDriver(t, 4, 4)
	ws := ids.New()
	mustLaunch(t, d, newInstance(ws, 2))
	_, err := d.Launch(t.Context(), newInstance(ws, 1))
	wantReason(t, err, commonv1.Reason_REASON_EPOCH_SUPERSEDED)
	_, err = d.Launch(t.Context(), newInstance(ws, 3))
	wantReason(t, err, commonv1.Reason_REASON_PREVIOUS_EPOCH_ALIVE)
	mustEnd(t, d, ws, 2)
	mustLaunch(t, d, newInstance(ws, 3))
}

// An instance that counts as ended by an attestation does not prevent a later epoch; it is listed, and counts against
// the host's capacity, until its end is confirmed.
func TestAFencedEpochBlocksNoLaterOne(t *testing.T) {
	d := newDriver(t, 2, 4)
	ws := ids.New()
	mustLaunch(t, d, newInstance(ws, 1))
	waitProcs(t, d, ws, 1, 1, 2)
	for range 2 {
		if err := d.Fence(t.Context(), ws, 1, "powered_off, says olga: it is dark"); err != nil {
			t.Fatal(err)
		}
	}
	_, err := d.Launch(t.Context(), newInstance(ws, 1))
	wantReason(t, err, commonv1.Reason_REASON_EPOCH_ENDED)
	mustLaunch(t, d, newInstance(ws, 2))
	waitProcs(t, d, ws, 1, 1, 2) // an attestation ends no process
	_, err = d.Launch(t.Context(), newInstance(ids.New(), 1))
	wantReason(t, err, commonv1.Reason_REASON_NO_CAPACITY)
	list, err := d.List(t.Context())
	if err != nil || len(list) != 2 || !list[0].EndedAt.IsZero() || !list[1].EndedAt.IsZero() {
		t.Fatalf("%+v %v", list, err)
	}
	raw, err := os.ReadFile(d.launchLog.path)
	if err != nil || strings.Count(string(raw), "says olga") != 1 {
		t.Errorf("the word is not once on record: %s %v", raw, err)
	}
	mustEnd(t, d, ws, 1)
	waitProcs(t, d, ws, 1, 0, 0)
	mustLaunch(t, d, newInstance(ids.New(), 1))
}

func TestAnEpochEndedBeforeItWasIsNeverLaunched(t *testing.T) {
	d := newDriver(t, 4, 4)
	ws := ids.New()
	mustEnd(t, d, ws, 1)
	_, err := d.Launch(t.Context(), newInstance(ws, 1))
	wantReason(t, err, commonv1.Reason_REASON_EPOCH_ENDED)
}

func TestCapacityIsExact(t *testing.T) {
	d := newDriver(t, 2, 2)
	a, b := newInstance(ids.New(), 1), newInstance(ids.New(), 1)
	a.GPUs, b.GPUs = 1, 2
	mustLaunch(t, d, a)
	_, err := d.Launch(t.Context(), b)
	wantReason(t, err, commonv1.Reason_REASON_NO_CAPACITY)
	b.GPUs = 1
	mustLaunch(t, d, b)
	_, err = d.Launch(t.Context(), newInstance(ids.New(), 1))
	wantReason(t, err, commonv1.Reason_REASON_NO_CAPACITY)
}

func TestADeadAgentIsPoweredOnAgainAsTheSameInstance(t *testing.T) {
	d := newDriver(t, 4, 4)
	ws := ids.New()
	mustLaunch(t, d, newInstance(ws, 1))
	waitProcs(t, d, ws, 1, 1, 2)
	procs, err := scan(d.root(), everything)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range procs[instanceID(ws, 1)] {
		if p.agent {
			if err := unix.Kill(p.pid, unix.SIGKILL); err != nil {
				t.Fatal(err)
			}
		}
	}
	testkit.Eventually(t, testkit.Patience, func() error {
		if err := d.keepOnce(t.Context()); err != nil {
			return err
		}
		if a, _ := running(t, d, ws, 1); a != 1 {
			return fmt.Errorf("%d agents", a)
		}
		return nil
	})
	raw, err := os.ReadFile(d.launchLog.path)
	if err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(string(raw), `"op":"launched"`); n != 1 {
		t.Fatalf("%d launches in the log", n)
	}
}

// A crash between the start of the agent and its record must not make a second one.
func TestAStartWithoutItsRecordIsAdopted(t *testing.T) {
	d := newDriver(t, 4, 4)
	ws := ids.New()
	b := newInstance(ws, 1)
	err := d.launchLog.with(t.Context(), func(_ *content, write func(entry) error) error {
		return write(entry{Op: opIntent, WorkspaceID: ws, Epoch: 1, InstanceID: b.InstanceID})
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := d.furnish(b); err != nil {
		t.Fatal(err)
	}
	if _, err := d.start(ws, 1, 0, nil); err != nil {
		t.Fatal(err)
	}
	waitProcs(t, d, ws, 1, 1, 2)
	mustLaunch(t, d, b)
	waitProcs(t, d, ws, 1, 1, 2)
}

func TestATornLastLineIsCut(t *testing.T) {
	d := newDriver(t, 4, 4)
	ws := ids.New()
	mustLaunch(t, d, newInstance(ws, 1))
	f, err := os.OpenFile(d.launchLog.path, os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteString(`{"op":"ended","workspace_`); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	list, err := d.List(t.Context())
	if err != nil || len(list) != 1 || !list[0].EndedAt.IsZero() {
		t.Fatalf("%+v %v", list, err)
	}
}

func TestADamagedLaunchLogIsRefused(t *testing.T) {
	d := newDriver(t, 4, 4)
	mustLaunch(t, d, newInstance(ids.New(), 1))
	raw, err := os.ReadFile(d.launchLog.path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(d.launchLog.path, append([]byte("garbage\n"), raw...), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := d.List(t.Context()); !errors.Is(err, errTorn) {
		t.Fatalf("got %v", err)
	}
	// The cleanup must still find its instances.
	if err := os.WriteFile(d.launchLog.path, raw, 0o600); err != nil {
		t.Fatal(err)
	}
}
