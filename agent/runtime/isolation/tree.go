package isolation

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"syscall"
	"time"

	"github.com/gpuaas/mesh/agent/runtime/procfs"
	"github.com/gpuaas/mesh/internal/workrules"
)

// runVariable marks, in the environment, every process of one start of a workload.
const runVariable = workrules.RunVariable

// Tree finds all processes of a workload: by its control groups where there are any, and else by session, parent, uid
// and the variable of the run.
type Tree struct {
	Cgroups []string
	Child   procfs.Process
	Run     string
	UID     int // of the workload; -1: the agent's own
	Parent  int // a shim that reaps the workload's orphans: every descendant belongs. 0: unknown
}

// Members returns the living processes of the workload.
func (t Tree) Members() []procfs.Process {
	found := map[int]procfs.Process{}
	for _, dir := range t.Cgroups {
		for _, pid := range cgroupMembers(dir) {
			if s, err := procfs.ReadStat(pid); err == nil && !s.Zombie {
				found[pid] = s.Process
			}
		}
	}
	// No process can leave its control groups; the walk is for hosts without them, and for a start that failed half way.
	if len(t.Cgroups) == 0 || t.Child.Alive() || t.Parent != 0 {
		t.walk(found)
	}
	delete(found, os.Getpid())
	return slices.Collect(maps.Values(found))
}

// walk adds to found the processes of the host that belong to the workload.
func (t Tree) walk(found map[int]procfs.Process) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return
	}
	all := make(map[int]procfs.Stat, len(entries))
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		if s, err := procfs.ReadStat(pid); err == nil {
			all[pid] = s
		}
	}
	childAlive := all[t.Child.PID].Start == t.Child.Start && !t.Child.IsZero()
	// The kernel does not reuse a pid while it names a session with members: if another process has it, no member of the
	// workload's session is left.
	_, recycled := all[t.Child.PID]
	recycled = recycled && !childAlive
	for pid, s := range all {
		if s.Zombie {
			continue
		}
		switch {
		case childAlive && descends(all, pid, t.Child.PID),
			t.Parent != 0 && pid != t.Parent && descends(all, pid, t.Parent),
			t.bySession(s) && (childAlive || !recycled && ownedBy(pid, t.UID)),
			t.Run != "" && marked(pid, t.Run):
			found[pid] = s.Process
		}
	}
}

// bySession reports whether a process is in the session that the workload's first process leads. Once that one is gone
// the number alone proves nothing, and the owner must match too.
func (t Tree) bySession(s procfs.Stat) bool {
	return !t.Child.IsZero() && s.Session == t.Child.PID && s.Start >= t.Child.Start
}

func descends(all map[int]procfs.Stat, pid, ancestor int) bool {
	for range len(all) {
		if pid == ancestor {
			return true
		}
		s, ok := all[pid]
		if !ok || s.Parent <= 1 {
			return s.Parent == ancestor && ok
		}
		pid = s.Parent
	}
	return false
}

func ownedBy(pid, uid int) bool {
	if uid <= 0 {
		return false
	}
	info, err := os.Stat(filepath.Join("/proc", strconv.Itoa(pid)))
	if err != nil {
		return false
	}
	sys, ok := info.Sys().(*syscall.Stat_t)
	return ok && int(sys.Uid) == uid
}

func marked(pid int, run string) bool {
	environ, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "environ"))
	if err != nil {
		return false
	}
	want := []byte(runVariable + "=" + run)
	for v := range bytes.SplitSeq(environ, []byte{0}) {
		if bytes.Equal(v, want) {
			return true
		}
	}
	return false
}

// KillWait bounds how long Kill tries to end a workload that keeps forking.
const KillWait = 10 * time.Second

// Kill ends every process of the workload and returns when none is left. reap, if set, collects the caller's own dead
// children meanwhile.
func (t Tree) Kill(reap func()) error {
	deadline := time.Now().Add(KillWait)
	for {
		members := t.Members()
		if len(members) == 0 {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("%d processes of the workload do not end", len(members))
		}
		freeze(t.Cgroups, true)
		if len(t.Cgroups) > 0 {
			members = t.Members() // frozen processes cannot fork between this call and the kill
		}
		var errs []error
		for _, m := range members {
			errs = append(errs, m.Signal(syscall.SIGKILL))
		}
		freeze(t.Cgroups, false)
		if err := errors.Join(errs...); err != nil {
			return err
		}
		for _, m := range members {
			m.Wait(200 * time.Millisecond)
		}
		if reap != nil {
			reap()
		}
	}
}
