package process

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

	"golang.org/x/sys/unix"
)

// marker is a variable in the environment of an instance's agent and of the processes that inherit it.
const marker = "GPUAAS_BOX"

// startTicks returns when a process began, in clock ticks since boot (proc(5), field 22 of stat). Zero: there is no
// such process, or it has ended.
func startTicks(pid int) uint64 {
	_, ticks := parentAndStart(pid)
	return ticks
}

// parentAndStart returns the parent of a process and when it began, in clock ticks since boot. Zeros: there is no such
// process, or it has ended.
func parentAndStart(pid int) (int, uint64) {
	stat, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
	if err != nil {
		return 0, 0
	}
	// The second field is the name in parentheses and may hold anything.
	fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	if len(fields) < 20 || fields[0] == "Z" || fields[0] == "X" {
		return 0, 0 // a zombie has ended and was not waited for
	}
	parent, _ := strconv.Atoi(fields[1])
	ticks, _ := strconv.ParseUint(fields[19], 10, 64)
	return parent, ticks
}

// alive reports whether the process with that pid is still the one that began at that time.
func alive(pid int, ticks uint64) bool {
	return pid > 0 && ticks > 0 && startTicks(pid) == ticks
}

// proc is one process of the host.
type proc struct {
	pid, ppid int
	ticks     uint64 // when it began, in clock ticks since boot
	instance  string // the id of the instance that it belongs to; empty: none
	agent     bool   // it is the instance's agent itself
	nearby    bool   // only its working directory is in the instance's directory
}

// breadth selects which processes scan counts as an instance's.
type breadth int

const (
	everything breadth = iota // also those with a working directory in one of the instance's directories
	marked                    // those with the marker, shims and agents of the instance, and their descendants
)

// scan lists the processes of all instances below root by the instances' ids. It recognizes them by the marker, by a
// shim's or an agent's directory, or by a workload's working directory, and includes all their descendants. One scan of
// the host serves all instances.
func scan(root string, of breadth) (map[string][]proc, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, fmt.Errorf("list processes: %w", err)
	}
	all := map[int]proc{}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid == os.Getpid() {
			continue
		}
		if p, ok := inspect(pid, root); ok {
			if p.nearby && of == marked {
				p.instance = ""
			}
			all[pid] = p
		}
	}
	// Descendants of an instance's processes are the instance's.
	for changed := true; changed; {
		changed = false
		for pid, p := range all {
			if parent := all[p.ppid]; p.instance == "" && parent.instance != "" {
				p.instance = parent.instance
				all[pid] = p
				changed = true
			}
		}
	}
	out := map[string][]proc{}
	for _, p := range all {
		if p.instance != "" {
			out[p.instance] = append(out[p.instance], p)
		}
	}
	return out, nil
}

func inspect(pid int, root string) (proc, bool) {
	base := filepath.Join("/proc", strconv.Itoa(pid))
	p := proc{pid: pid}
	if p.ppid, p.ticks = parentAndStart(pid); p.ticks == 0 {
		return proc{}, false
	}
	if cmd, err := os.ReadFile(filepath.Join(base, "cmdline")); err == nil {
		args := strings.Split(string(cmd), "\x00")
		if p.instance = agentOf(args, root); p.instance != "" {
			p.agent = true
			return p, true
		}
		// A shim names its workload's directory. Any other process that names a path below the instance may be an operator
		// who reads its log.
		if len(args) > 2 && args[1] == "shim" {
			p.instance = below(root, args[2])
		}
	}
	if env, err := os.ReadFile(filepath.Join(base, "environ")); err == nil && p.instance == "" {
		for v := range strings.SplitSeq(string(env), "\x00") {
			if id, ok := strings.CutPrefix(v, marker+"="+root+"/"); ok {
				p.instance = id
			}
		}
	}
	if cwd, err := os.Readlink(filepath.Join(base, "cwd")); err == nil && p.instance == "" {
		// A workload that lost its shim and hid its environment still has its working directory, as its workspace's user:
		// never as this process's user, if that is root.
		if info, err := os.Stat(base); err == nil && (os.Getuid() != 0 || ownerOf(info) != 0) {
			p.instance = below(root, cwd)
			p.nearby = p.instance != ""
		}
	}
	return p, true
}

// below returns the id of the instance whose directory contains a path; empty if none does, or if the path is the
// directory itself.
func below(root, path string) string {
	rest, ok := strings.CutPrefix(path, root+"/")
	if !ok {
		return ""
	}
	id, rest, _ := strings.Cut(rest, "/")
	if rest == "" {
		return "" // an operator may have the instance's own directory as working directory
	}
	return id
}

// agentOf returns the id of the instance whose agent has the command line `… run … --state-dir <root>/<id>/state …`, or
// "" if it is none.
func agentOf(args []string, root string) string {
	if len(args) < 2 || args[1] != "run" {
		return ""
	}
	for i := 2; i+1 < len(args); i++ {
		if args[i] == "--state-dir" && filepath.Base(args[i+1]) == "state" {
			return below(root, args[i+1])
		}
	}
	return ""
}

func ownerOf(info os.FileInfo) uint32 {
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		return st.Uid
	}
	return 0
}

// errAlive means that an instance has processes that do not end.
var errAlive = errors.New("processes of the instance do not end")

// endAll ends every process of these instances: the agents first by SIGTERM, so that they can record what they did,
// then everything by SIGKILL once an instance's agent has ended or gentle has passed, until a scan finds nothing. It
// returns errAlive if processes are left 20 seconds after gentle.
func endAll(ctx context.Context, root string, of breadth, ids []string, gentle time.Duration) error {
	procs, err := scan(root, of)
	if err != nil {
		return err
	}
	for _, id := range ids {
		for _, p := range procs[id] {
			if p.agent {
				_ = unix.Kill(p.pid, unix.SIGTERM)
			}
		}
	}
	deadline := time.Now().Add(gentle)
	limit := time.Now().Add(gentle + 20*time.Second)
	for {
		if procs, err = scan(root, of); err != nil {
			return err
		}
		left := 0
		for _, id := range ids {
			left += len(procs[id])
			if len(procs[id]) > 0 && (!agentLives(procs[id]) || time.Now().After(deadline)) {
				for _, p := range procs[id] {
					_ = unix.Kill(p.pid, unix.SIGKILL)
				}
			}
		}
		if left == 0 {
			return nil
		}
		if time.Now().After(limit) {
			return fmt.Errorf("%w: %d left", errAlive, left)
		}
		if err := awaitEnd(ctx, procs, ids); err != nil {
			return err
		}
	}
}

// awaitEnd waits until the agents of these instances have ended, or all found processes where no agent is left, but
// half a second at most. It reads these processes alone, where a scan reads all of the host.
func awaitEnd(ctx context.Context, procs map[string][]proc, ids []string) error {
	for until := time.Now().Add(500 * time.Millisecond); ; {
		select {
		case <-time.After(20 * time.Millisecond):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		ended := !slices.ContainsFunc(ids, func(id string) bool {
			agents := agentLives(procs[id])
			return slices.ContainsFunc(procs[id], func(p proc) bool { return p.agent == agents && alive(p.pid, p.ticks) })
		})
		if ended || time.Now().After(until) {
			return nil
		}
	}
}

func agentLives(procs []proc) bool {
	return slices.ContainsFunc(procs, func(p proc) bool { return p.agent })
}
