package host

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// Process is the kernel's record of a process.
type Process struct {
	State  string // R, S, T, Z; empty: there is none
	Parent int
	Start  uint64 // with the pid, identifies a process for ever
}

// Kernel returns the record of a process; its state is empty if there is none.
func Kernel(pid int) Process {
	stat, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
	if err != nil {
		return Process{}
	}
	i := bytes.LastIndexByte(stat, ')') // the name before it may hold anything
	fields := strings.Fields(string(stat[i+1:]))
	if i < 0 || len(fields) < 20 {
		return Process{}
	}
	p := Process{State: fields[0]}
	p.Parent, _ = strconv.Atoi(fields[1])
	p.Start, _ = strconv.ParseUint(fields[19], 10, 64)
	return p
}

// Gone returns nil if a process has ended.
func Gone(pid int, was Process) error {
	if now := Kernel(pid); now.State != "" && now.State != "Z" && now.Start == was.Start {
		return fmt.Errorf("process %d is there, in state %s", pid, now.State)
	}
	return nil
}

// Stopped returns nil if a process is stopped.
func Stopped(pid int) error {
	if s := Kernel(pid).State; s != "T" {
		return fmt.Errorf("process %d is in state %q, not stopped", pid, s)
	}
	return nil
}
