package cgroup_test

import (
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/gpuaas/mesh/internal/cgroup"
	"github.com/gpuaas/mesh/internal/testkit"
)

// hierarchy returns a directory of a cgroup file system in which groups can be made, or "".
func hierarchy() string {
	for _, dir := range []string{"/sys/fs/cgroup/pids", "/sys/fs/cgroup"} {
		probe := filepath.Join(dir, "gpuaas-probe-of-a-test")
		if err := os.Mkdir(probe, 0o755); err == nil { // the kernel's file system
			_ = os.Remove(probe)
			if _, err := os.Stat(filepath.Join(dir, "cgroup.procs")); err == nil {
				return dir
			}
		}
	}
	return ""
}

func state(t *testing.T) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "boxes", "a", "state")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	return dir
}

func exists(t *testing.T, path string) bool {
	t.Helper()
	_, err := os.Stat(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	return err == nil
}

func TestRecordNamesEachDirectoryOnce(t *testing.T) {
	testkit.IO(t)
	dir := state(t)
	path := filepath.Join(dir, cgroup.File)
	// A crash has cut the last line.
	if err := os.WriteFile(path, []byte("/sys/fs/cgroup/pids/gp"), 0o600); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := errors.Join(cgroup.Record(dir, "/one"), cgroup.Record(dir, "/two")); err != nil {
			t.Fatal(err)
		}
	}
	data, err := os.ReadFile(path)
	if want := "/sys/fs/cgroup/pids/gp\n/one\n/two\n"; err != nil || string(data) != want {
		t.Errorf("recorded %q, %v; want %q", data, err, want)
	}
}

func TestRemoveLeavesWhatIsNotAnAgents(t *testing.T) {
	testkit.IO(t)
	dir := state(t)
	other := filepath.Join(t.TempDir(), cgroup.Name(dir))
	if err := os.MkdirAll(other, 0o700); err != nil {
		t.Fatal(err)
	}
	for _, line := range []string{other, "/sys/fs/cgroup", "/sys/fs/cgroup/../cgroup/pids", "gpuaas/0123456789ab", ""} {
		if err := cgroup.Record(dir, line); err != nil {
			t.Fatal(err)
		}
	}
	if err := cgroup.RemoveBelow(filepath.Dir(filepath.Dir(filepath.Dir(dir)))); err != nil {
		t.Fatal(err)
	}
	if !exists(t, other) {
		t.Error("a directory of another file system was removed")
	}
	if exists(t, filepath.Join(dir, cgroup.File)) {
		t.Error("the record is left")
	}
}

// Scenario: an agent was killed. Its groups are removed when nothing runs in them any more, and not before.
func TestRemoveWaitsForProcesses(t *testing.T) {
	testkit.IO(t)
	top := hierarchy()
	if top == "" {
		t.Log("this host gives no control groups")
		return
	}
	dir := state(t)
	root := filepath.Join(top, cgroup.Name(dir))
	work := filepath.Join(root, "workspace", "app")
	// the kernel's file system
	if err := errors.Join(cgroup.Record(dir, root), os.MkdirAll(work, 0o755)); err != nil {
		t.Fatal(err)
	}
	inside := exec.Command("sleep", "3600") // killed below
	if err := inside.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = inside.Process.Kill() })
	if err := os.WriteFile(filepath.Join(work, "cgroup.procs"), []byte(strconv.Itoa(inside.Process.Pid)),
		0o600); err != nil {
		t.Fatal(err)
	}
	if err := cgroup.Remove(dir); err == nil || !strings.Contains(err.Error(), work) {
		t.Errorf("Remove beside a process = %v, want an error that names %s", err, work)
	}
	if !exists(t, work) || !exists(t, filepath.Join(dir, cgroup.File)) {
		t.Error("the group of a process, or the record of it, was removed")
	}
	if err := inside.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = inside.Wait()
	if err := cgroup.RemoveBelow(filepath.Dir(filepath.Dir(filepath.Dir(dir)))); err != nil {
		t.Fatal(err)
	}
	if exists(t, root) || exists(t, filepath.Join(dir, cgroup.File)) {
		t.Error("the groups or their record are left")
	}
}
