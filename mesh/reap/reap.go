// Package reap finds and ends the processes that agents and their workloads left running below a directory.
//
// A process counts as ours only by its own properties: a node agent or one of its shims whose command line names the
// directory, a descendant of one, or an orphan whose working directory is the directory. A pid in a file proves
// nothing. Guarantees: no other process is ever signalled, not even a shell or an editor in the directory; End returns
// nil only when a scan has found no process.
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

	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/cgroup"
)

// Process is a process of an agent or its workloads.
type Process struct {
	PID, Parent int
	Args        []string
	cwd         string
}

// agent reports whether the process is an agent itself, which is asked to end before it is killed.
func (p Process) agent() bool { return len(p.Args) > 1 && p.Args[1] == "run" }

// Under lists the live processes that belong to agents below dir, program being the file name of the agent's binary.
// Without /proc it finds none.
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

// root reports whether a process is ours by its own properties.
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
	// The second field is the name in parentheses and may contain any character.
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

// End asks the agents below dir to end, waits for them at most gentle, kills the remaining processes, removes the
// control groups of all, and returns how many processes it found.
func End(ctx context.Context, dir, program string, gentle time.Duration) (int, error) {
	met, err := end(ctx, dir, program, gentle, func(Process) bool { return true })
	if err != nil {
		return met, err
	}
	return met, cgroup.RemoveBelow(dir)
}

// EndAgents does the same as End for the agents alone: the processes that they run live on.
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
		if waiting {
			procs = slices.DeleteFunc(procs, func(p Process) bool { return !p.agent() })
		}
		if !awaitEnd(ctx, procs) {
			return len(seen), fmt.Errorf("end leftover processes: %w", context.Cause(ctx))
		}
	}
}

// awaitEnd waits until all of these processes have ended, but half a second at most, and reports whether ctx has not
// ended. It reads these processes alone, where Under reads all of the host.
func awaitEnd(ctx context.Context, procs []Process) bool {
	for until := time.Now().Add(500 * time.Millisecond); ; {
		if !app.Sleep(ctx, 20*time.Millisecond) {
			return false
		}
		alive := slices.ContainsFunc(procs, func(p Process) bool {
			now, ok := inspect(p.PID)
			return ok && now.Parent == p.Parent
		})
		if !alive || time.Now().After(until) {
			return true
		}
	}
}
