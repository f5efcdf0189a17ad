package drill

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/gpuaas/mesh/mesh/agents"
	"github.com/gpuaas/mesh/mesh/reap"
)

// This file reads the host independently: it shares no code with the detectors of faults or with the driver whose
// launch log it reads.

// line is one entry of the placement driver's launch log.
type line struct {
	Op          string    `json:"op"`
	At          time.Time `json:"at"`
	WorkspaceID string    `json:"workspace_id"`
	Epoch       int64     `json:"epoch"`
	PID         int       `json:"pid"`
}

// readLedger reads the complete lines of a launch log; a last line without its end is not written yet.
func readLedger(file string) ([]line, error) {
	data, err := os.ReadFile(file) //nolint:gosec // of our own mesh
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var out []line
	for text := range strings.Lines(string(data)) {
		if !strings.HasSuffix(text, "\n") {
			break
		}
		var l line
		if err := json.Unmarshal([]byte(text), &l); err != nil {
			return nil, fmt.Errorf("ledger: %w: %s", err, text)
		}
		out = append(out, l)
	}
	return out, nil
}

func (m *Mesh) ledger() ([]line, error) {
	return readLedger(filepath.Join(m.cluster.Plan.InstanceDir, "launches.jsonl"))
}

// launches checks a launch log's lines of one workspace: each epoch is launched once, and none begins while another
// lives. It returns how many were launched, and the epoch that lives, zero for none.
func launches(ledger []line, workspaceID string) (int, int64, error) {
	count, live := 0, int64(0)
	launched := map[int64]int{}
	var errs []error
	for _, l := range ledger {
		if l.WorkspaceID != workspaceID {
			continue
		}
		switch l.Op {
		case "intent", "launched":
			if live != 0 && live != l.Epoch {
				errs = append(errs, fmt.Errorf("epoch %d begins while epoch %d lives", l.Epoch, live))
			}
			if l.Op == "launched" {
				launched[l.Epoch]++
				count++
			}
			live = l.Epoch
		case "ended":
			if live == l.Epoch {
				live = 0
			}
		}
	}
	for epoch, n := range launched {
		if n != 1 {
			errs = append(errs, fmt.Errorf("epoch %d was launched %d times", epoch, n))
		}
	}
	return count, live, errors.Join(errs...)
}

// instanceDir returns the directory of an instance.
func (m *Mesh) instanceDir(workspaceID string, epoch int64) string {
	return filepath.Join(m.cluster.Plan.InstanceDir, "boxes", workspaceID+"-"+strconv.FormatInt(epoch, 10))
}

// instancePID returns the process of an instance's agent by the launch log: as launched, or as last powered on again.
func (m *Mesh) instancePID(workspaceID string, epoch int64) (int, error) {
	ledger, err := m.ledger()
	if err != nil {
		return 0, err
	}
	pid := 0
	for _, l := range ledger {
		if l.WorkspaceID == workspaceID && l.Epoch == epoch && (l.Op == "launched" || l.Op == "restarted") {
			pid = l.PID
		}
	}
	if pid == 0 {
		return 0, errors.New("the ledger knows no launch of it")
	}
	return pid, nil
}

// oneLife checks that of all epochs of a workspace only this one has a live agent; zero: none has.
func (m *Mesh) oneLife(workspaceID string, epoch int64) error {
	dirs, err := filepath.Glob(filepath.Join(m.cluster.Plan.InstanceDir, "boxes", workspaceID+"-*"))
	if err != nil {
		return err
	}
	for _, dir := range dirs {
		procs, err := reap.Under(dir, agents.Program)
		if err != nil {
			return err
		}
		n := 0
		for _, p := range procs {
			if len(p.Args) > 1 && p.Args[1] == "run" {
				n++
			}
		}
		switch mine := dir == m.instanceDir(workspaceID, epoch); {
		case mine && n != 1:
			return fmt.Errorf("%d agents run in the instance of epoch %d", n, epoch)
		case !mine && len(procs) > 0:
			return fmt.Errorf("%d processes run in %s, whose epoch is over", len(procs), filepath.Base(dir))
		}
	}
	return nil
}

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

// rising checks that no epoch of a workspace was launched after a higher one.
func rising(ledger []line, workspaceID string) error {
	var errs []error
	highest := int64(0)
	for _, l := range ledger {
		if l.WorkspaceID != workspaceID || l.Op != "launched" {
			continue
		}
		if l.Epoch <= highest {
			errs = append(errs, fmt.Errorf("epoch %d of workspace %s is launched after epoch %d", l.Epoch, workspaceID, highest))
		}
		highest = l.Epoch
	}
	return errors.Join(errs...)
}
