// Package reap finds and ends what agents and their workloads left running below a directory.
//
// A process is believed to be ours only by what it is: a node agent or one of its shims whose command line names the directory, a descendant of one, or
// an orphan that stands in the directory. A number in a file proves nothing. Guarantees: nobody else is ever signalled, a shell or an editor in the
// directory included; End returns nil only when a look has found nobody.
package reap

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/gpuaas/mesh/internal/cgroup"
)

// Process is one of ours.
type Process struct {
	PID, Parent int
	Args        []string
	cwd         string
}

// agent says whether it is an agent itself, which is asked before it is killed.
func (p Process) agent() bool { return len(p.Args) > 1 && p.Args[1] == "run" }

// Under lists the live processes that belong to agents below dir, program being the file name of the agent's binary. Where there is no /proc it finds
// none.
func Under(dir, program string) ([]Process, error) {
	entries, err := os.ReadDir("/proc")
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list processes: %w", err)
	}
	all, mine := map[int]Process{}, map[int]bool{}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid == os.Getpid() {
			continue
		}
		if p, ok := inspect(pid); ok {
			all[pid], mine[pid] = p, root(p, dir, program)
		}
	}
	for changed := true; changed; {
		changed = false
		for pid, p := range all {
			if !mine[pid] && mine[p.Parent] {
				mine[pid], changed = true, true
			}
		}
	}
	var out []Process
	for pid, p := range all {
		if mine[pid] {
			out = append(out, p)
		}
	}
	return out, nil
}

// root says whether a process is ours by its own signs.
func root(p Process, dir, program string) bool {
	if p.Parent == 1 && within(p.cwd, dir) {
		return true
	}
	if len(p.Args) == 0 || filepath.Base(p.Args[0]) != program {
		return false
	}
	return slices.ContainsFunc(p.Args[1:], func(arg string) bool {
		if _, value, ok := strings.Cut(arg, "="); ok && strings.HasPrefix(arg, "-") {
			arg = value
		}
		return within(arg, dir)
	})
}

func within(path, dir string) bool { return path == dir || strings.HasPrefix(path, dir+"/") }

func inspect(pid int) (Process, bool) {
	base := filepath.Join("/proc", strconv.Itoa(pid))
	stat, err := os.ReadFile(filepath.Join(base, "stat"))
	if err != nil {
		return Process{}, false
	}
	// The second field is the name in parentheses and may hold anything.
	fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	if len(fields) < 2 || fields[0] == "Z" || fields[0] == "X" {
		return Process{}, false // ended, only not waited for
	}
	parent, err := strconv.Atoi(fields[1])
	if err != nil {
		return Process{}, false
	}
	p := Process{PID: pid, Parent: parent}
	if line, err := os.ReadFile(filepath.Join(base, "cmdline")); err == nil && len(line) > 0 {
		p.Args = strings.Split(strings.TrimRight(string(line), "\x00"), "\x00")
	}
	p.cwd, _ = os.Readlink(filepath.Join(base, "cwd"))
	return p, true
}

// End asks the agents below dir to end, waits for them at most gentle, kills whatever is left, removes the control groups of all, and returns how many
// processes it met.
func End(ctx context.Context, dir, program string, gentle time.Duration) (int, error) {
	met, err := end(ctx, dir, program, gentle, func(Process) bool { return true })
	if err != nil {
		return met, err
	}
	return met, cgroup.RemoveBelow(dir)
}

// EndAgents is End for the agents alone: what they run lives on.
func EndAgents(ctx context.Context, dir, program string, gentle time.Duration) (int, error) {
	return end(ctx, dir, program, gentle, Process.agent)
}

func end(ctx context.Context, dir, program string, gentle time.Duration, which func(Process) bool) (int, error) {
	const limit = 10 * time.Second
	began := time.Now()
	seen := map[int]bool{}
	for {
		procs, err := Under(dir, program)
		procs = slices.DeleteFunc(procs, func(p Process) bool { return !which(p) })
		if err != nil || len(procs) == 0 {
			return len(seen), err
		}
		waiting := time.Since(began) < gentle && slices.ContainsFunc(procs, Process.agent)
		for _, p := range procs {
			switch {
			case !waiting:
				_ = syscall.Kill(p.PID, syscall.SIGKILL) // it may be gone
			case p.agent() && !seen[p.PID]:
				_ = syscall.Kill(p.PID, syscall.SIGTERM) // it may be gone
			}
			seen[p.PID] = true
		}
		if time.Since(began) > gentle+limit {
			return len(seen), fmt.Errorf("%d processes below %s do not end", len(procs), dir)
		}
		select {
		case <-ctx.Done():
			return len(seen), fmt.Errorf("end leftover processes: %w", context.Cause(ctx))
		case <-time.After(20 * time.Millisecond):
		}
	}
}
