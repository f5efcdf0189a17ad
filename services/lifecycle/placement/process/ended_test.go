package process

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/gpuaas/mesh/internal/cgroup"
	"github.com/gpuaas/mesh/internal/ids"
)

// group makes a control group as the agent of the instance does, and returns its directory; "" if this host allows
// none.
func group(t *testing.T, d *Driver, ws string, epoch int64) string {
	t.Helper()
	state := filepath.Join(d.instanceDir(ws, epoch), "state")
	for _, top := range []string{"/sys/fs/cgroup/pids", "/sys/fs/cgroup"} {
		root := filepath.Join(top, cgroup.Name(state))
		if err := os.MkdirAll(filepath.Join(root, ws, "app"), 0o755); err != nil { // the kernel's file system
			continue
		}
		if err := cgroup.Record(state, root); err != nil {
			t.Fatal(err)
		}
		return root
	}
	t.Log("this host gives no control groups")
	return ""
}

// An instance that has ended leaves its log for a time, and no control group.
func TestAnEndedInstanceLeavesNoControlGroup(t *testing.T) {
	d := newDriver(t, 4, 4)
	ws := ids.New()
	mustLaunch(t, d, newInstance(ws, 1))
	root := group(t, d, ws, 1)
	mustEnd(t, d, ws, 1)
	if root != "" {
		if _, err := os.Stat(root); !os.IsNotExist(err) {
			t.Errorf("the control group of the ended instance is left: %v", err)
		}
	}
	if _, err := os.Stat(filepath.Join(d.instanceDir(ws, 1), "agent.log")); err != nil {
		t.Errorf("its log is not kept: %v", err)
	}
}

// Directories of ended instances go by age and by number, oldest first. Those of live instances, and directories that
// are not in the launch log, stay.
func TestDirectoriesOfEndedInstancesAreRemoved(t *testing.T) {
	d := newDriver(t, 9, 9)
	d.cfg.KeepEnded, d.cfg.KeepEndedMax = time.Hour, 2
	ws := ids.New()
	for epoch := int64(1); epoch <= 5; epoch++ {
		mustLaunch(t, d, newInstance(ws, epoch))
		if epoch < 5 {
			mustEnd(t, d, ws, epoch)
		}
	}
	if err := os.Mkdir(filepath.Join(d.root(), "somebody-elses-7"), 0o700); err != nil {
		t.Fatal(err)
	}
	left := func(now time.Time) []string {
		t.Helper()
		if err := d.prune(t.Context(), now); err != nil {
			t.Fatal(err)
		}
		entries, err := os.ReadDir(d.root())
		if err != nil {
			t.Fatal(err)
		}
		var names []string
		for _, e := range entries {
			names = append(names, e.Name())
		}
		slices.Sort(names)
		return names
	}
	want := []string{instanceID(ws, 3), instanceID(ws, 4), instanceID(ws, 5), "somebody-elses-7"}
	if got := left(time.Now()); !slices.Equal(got, want) {
		t.Errorf("left %q, want %q", got, want)
	}
	want = []string{instanceID(ws, 5), "somebody-elses-7"}
	if got := left(time.Now().Add(2 * time.Hour)); !slices.Equal(got, want) {
		t.Errorf("left after the time %q, want %q", got, want)
	}
	// The log still has all of them.
	list, err := d.List(t.Context())
	if err != nil || len(list) != 5 {
		t.Error(fmt.Errorf("the launch log lists %d, %w", len(list), err))
	}
}

// TestForgottenWorkspacesLeaveTheLaunchLog: lines are removed once nothing of a workspace runs or is on disk; the
// numbers of the others, the order of later ones and the refusal of older epochs stay.
func TestForgottenWorkspacesLeaveTheLaunchLog(t *testing.T) {
	d := newDriver(t, 8, 8)
	over, onDisk, live, last := ids.New(), ids.New(), ids.New(), ids.New()
	for _, ws := range []string{over, onDisk} {
		mustLaunch(t, d, newInstance(ws, 1))
		mustEnd(t, d, ws, 1)
	}
	running := newInstance(live, 1)
	mustLaunch(t, d, running)
	mustLaunch(t, d, newInstance(last, 1))
	mustEnd(t, d, last, 1)
	for _, ws := range []string{over, last} {
		if err := os.RemoveAll(d.instanceDir(ws, 1)); err != nil {
			t.Fatal(err)
		}
	}
	before, err := d.LaunchLog(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if lines, err := d.Forget(t.Context(), []string{over, onDisk, live, last}); err != nil || lines != 0 {
		t.Fatalf("%d lines went, error %v: a backup may be older than an end of a moment ago", lines, err)
	}
	d.cfg.RememberEnded = time.Nanosecond
	lines, err := d.Forget(t.Context(), []string{over, onDisk, live, last})
	if err != nil || lines != 4 {
		t.Fatalf("%d lines went, error %v; want the 4 of one workspace", lines, err)
	}
	after, err := d.LaunchLog(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if after.ID != before.ID || after.Seq != before.Seq || len(after.Entries) != len(before.Entries)-1 {
		t.Fatalf("launch log is %+v, and was %+v", after, before)
	}
	for _, e := range after.Entries {
		if e.WorkspaceID == over || !slices.Contains(before.Entries, e) {
			t.Errorf("entry %+v, which was not there before", e)
		}
	}
	mustLaunch(t, d, running)
	mustLaunch(t, d, newInstance(ids.New(), 1))
	next, err := d.LaunchLog(t.Context())
	if err != nil || next.Seq != before.Seq+2 {
		t.Fatalf("the next launch ends the log at line %d, error %v; want %d", next.Seq, err, before.Seq+2)
	}
}
