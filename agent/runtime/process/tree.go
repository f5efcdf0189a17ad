package process

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"github.com/gpuaas/mesh/internal/workrules"
)

// runVariable marks, in the environment, every process of one start of a workload.
const runVariable = workrules.RunVariable

// tree finds all processes of a workload: by its control groups where there are any, and else by session, parent, uid
// and the variable of the run.
type tree struct {
	cgroups []string
	child   ident
	run     string
	uid     int // of the workload; -1: the agent's own
	parent  int // a shim that reaps the workload's orphans: every descendant belongs. 0: unknown
}

// members returns the living processes of the workload.
func (t tree) members() []ident {
	found := map[int]ident{}
	for _, dir := range t.cgroups {
		for _, pid := range cgroupMembers(dir) {
			if s, err := readStat(pid); err == nil && !s.zombie {
				found[pid] = s.ident
			}
		}
	}
	// No process can leave its control groups; the walk is for hosts without them, and for a start that failed half way.
	if len(t.cgroups) == 0 || t.child.alive() || t.parent != 0 {
		t.walk(found)
	}
	delete(found, os.Getpid())
	out := make([]ident, 0, len(found))
	for _, i := range found {
		out = append(out, i)
	}
	return out
}

// walk adds to found the processes of the host that belong to the workload.
func (t tree) walk(found map[int]ident) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return
	}
	all := make(map[int]stat, len(entries))
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		if s, err := readStat(pid); err == nil {
			all[pid] = s
		}
	}
	childAlive := all[t.child.PID].Start == t.child.Start && !t.child.zero()
	// The kernel does not reuse a pid while it names a session with members: if another process has it, no member of the
	// workload's session is left.
	_, recycled := all[t.child.PID]
	recycled = recycled && !childAlive
	for pid, s := range all {
		if s.zombie {
			continue
		}
		switch {
		case childAlive && descends(all, pid, t.child.PID),
			t.parent != 0 && pid != t.parent && descends(all, pid, t.parent),
			t.bySession(s) && (childAlive || !recycled && ownedBy(pid, t.uid)),
			t.run != "" && marked(pid, t.run):
			found[pid] = s.ident
		}
	}
}

// bySession reports whether a process is in the session that the workload's first process leads. Once that one is gone
// the number alone proves nothing, and the owner must match too.
func (t tree) bySession(s stat) bool {
	return !t.child.zero() && s.session == t.child.PID && s.Start >= t.child.Start
}

func descends(all map[int]stat, pid, ancestor int) bool {
	for range len(all) {
		if pid == ancestor {
			return true
		}
		s, ok := all[pid]
		if !ok || s.parent <= 1 {
			return s.parent == ancestor && ok
		}
		pid = s.parent
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

// killWait bounds how long kill tries to end a workload that keeps forking.
const killWait = 10 * time.Second

// kill ends every process of the workload and returns when none is left. reap, if set, collects the caller's own dead
// children meanwhile.
func (t tree) kill(reap func()) error {
	deadline := time.Now().Add(killWait)
	for {
		members := t.members()
		if len(members) == 0 {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("%d processes of the workload do not end", len(members))
		}
		freeze(t.cgroups, true)
		if len(t.cgroups) > 0 {
			members = t.members() // frozen processes cannot fork between this call and the kill
		}
		var errs []error
		for _, m := range members {
			errs = append(errs, m.signal(syscall.SIGKILL))
		}
		freeze(t.cgroups, false)
		if err := errors.Join(errs...); err != nil {
			return err
		}
		for _, m := range members {
			m.gone(200 * time.Millisecond)
		}
		if reap != nil {
			reap()
		}
	}
}
