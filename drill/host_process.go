package drill

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// process is the kernel's record of a process.
type process struct {
	state  string // R, S, T, Z; empty: there is none
	parent int
	start  uint64 // with the pid, identifies a process for ever
}

// kernel reads it.
func kernel(pid int) process {
	stat, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
	if err != nil {
		return process{}
	}
	i := bytes.LastIndexByte(stat, ')') // the name before it may hold anything
	fields := strings.Fields(string(stat[i+1:]))
	if i < 0 || len(fields) < 20 {
		return process{}
	}
	p := process{state: fields[0]}
	p.parent, _ = strconv.Atoi(fields[1])
	p.start, _ = strconv.ParseUint(fields[19], 10, 64)
	return p
}

// gone returns nil if a process has ended.
func gone(pid int, was process) error {
	if now := kernel(pid); now.state != "" && now.state != "Z" && now.start == was.start {
		return fmt.Errorf("process %d is there, in state %s", pid, now.state)
	}
	return nil
}

// stopped returns nil if a process is stopped.
func stopped(pid int) error {
	if s := kernel(pid).state; s != "T" {
		return fmt.Errorf("process %d is in state %q, not stopped", pid, s)
	}
	return nil
}
