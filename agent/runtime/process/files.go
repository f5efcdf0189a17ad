package process

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// The files of a workload's directory. Agent and shim each write their own and only read the other's.
const (
	fileSpec    = "spec.json"    // by the agent: what to run
	fileDesired = "desired.json" // by the agent: whether to run it
	fileState   = "state.json"   // by the shim: the state of the workload
	fileLock    = "shim.lock"    // locked by the shim as long as it lives
	fileOutput  = "output.log"   // the workload's, of the present run
	fileShimLog = "shim.log"
)

// spec has everything that a shim needs to run a workload without its agent.
type spec struct {
	WorkspaceID string            `json:"workspace_id"`
	Name        string            `json:"name"`
	Epoch       int64             `json:"epoch"`
	OpSeq       int64             `json:"op_seq"`
	Digest      string            `json:"digest"`
	Argv        []string          `json:"argv"`
	Env         map[string]string `json:"env"`
	Dir         string            `json:"dir"`
	UID         int               `json:"uid"` // -1: as the agent
	Policy      string            `json:"policy"`
	GPUs        []string          `json:"gpus,omitempty"`
	Ports       []port            `json:"ports,omitempty"`
	Ready       probe             `json:"ready"`
	Cgroups     []string          `json:"cgroups,omitempty"`
	LogBytes    int64             `json:"log_bytes"`
	BackoffMin  time.Duration     `json:"backoff_min"`
	BackoffMax  time.Duration     `json:"backoff_max"`
	CalmAfter   time.Duration     `json:"calm_after,omitempty"`
}

// calm returns the duration from which on a run does not count towards a crash loop.
func (s spec) calm() time.Duration {
	if s.CalmAfter > 0 {
		return s.CalmAfter
	}
	return calmAfter // the file of an earlier agent
}

type port struct {
	Name   string `json:"name"`
	Port   int32  `json:"port"`
	Picked bool   `json:"picked"` // by the agent
}

type probe struct {
	HTTPPath string        `json:"http_path,omitempty"`
	Port     string        `json:"port,omitempty"`
	TCP      bool          `json:"tcp,omitempty"`
	Timeout  time.Duration `json:"timeout,omitempty"`
	// MinUptime is nil where the spec has none, and in the files of earlier agents.
	MinUptime *time.Duration `json:"min_uptime,omitempty"`
}

func (p probe) asks() bool { return p.HTTPPath != "" || p.TCP }

// minUptime returns how long a run must last before the workload is ready.
func (p probe) minUptime() time.Duration {
	switch {
	case p.MinUptime != nil:
		return *p.MinUptime
	case p.asks():
		return 0
	default:
		return DefaultMinUptime
	}
}

// The restart policies in a spec.
const (
	policyAlways    = "always"
	policyOnFailure = "on_failure"
	policyNever     = "never"
)

// desired is the agent's order to a shim: whether to run the workload.
type desired struct {
	Run   bool          `json:"run"`
	Grace time.Duration `json:"grace,omitempty"`
}

// The phases in a state, as the shim sees them.
const (
	phaseStarting = "starting"
	phaseRunning  = "running"
	phaseBackoff  = "backoff"
	phaseStopped  = "stopped"
	phaseExited   = "exited"
)

// state is the state of a workload, as its shim writes it.
type state struct {
	Phase     string    `json:"phase"`
	Run       string    `json:"run"` // marks the processes of one start, in their environment
	BootID    string    `json:"boot_id"`
	Shim      ident     `json:"shim"`
	Child     ident     `json:"child"`
	StartedAt time.Time `json:"started_at"`
	// RunningSince is when the workload was executed, by the host's clock since its boot, which cannot be set. Zero in the
	// files of earlier agents.
	RunningSince time.Duration `json:"running_since,omitempty"`
	Restarts     int32         `json:"restarts"` // includes one that is decided on and waits for its backoff
	// ShortRuns counts the runs in a row that ended by themselves before they were calm.
	ShortRuns int32 `json:"short_runs,omitempty"`
	// RanFor is how long the last run lasted that ended by itself, by the clock of RunningSince.
	RanFor    time.Duration `json:"ran_for,omitempty"`
	HasExited bool          `json:"has_exited"` // ExitCode is set
	ExitCode  int32         `json:"exit_code"`
	ExitedAt  time.Time     `json:"exited_at"`
	Adopted   bool          `json:"adopted"` // this shim took over a process that another one had started
	Final     bool          `json:"final"`   // by policy it is not started again
	Detail    string        `json:"detail,omitempty"`
}

// uptime returns how long the present run has lasted. The caller makes sure that the run has not ended, and that the
// host was not booted since it began.
func (s state) uptime() time.Duration {
	since := s.RunningSince
	if since <= 0 {
		since = s.Child.started()
	}
	return max(sinceBoot()-since, 0)
}

// restarted returns how often the workload was started again. Restarts includes a restart that waits for its backoff;
// restarted does not.
func (s state) restarted() int32 {
	if s.Phase == phaseBackoff {
		return max(s.Restarts-1, 0)
	}
	return s.Restarts
}

// wantedBy returns the order to assume for a workload whose desired file cannot be read: to run, unless it was stopped.
func wantedBy(s state) desired { return desired{Run: s.Phase != phaseStopped} }

// unfinished reports whether a file of a workload's directory is the leftover of an unfinished write.
func unfinished(name string) bool {
	for _, file := range []string{fileSpec, fileDesired, fileState, fileOutputInfo} {
		if strings.HasPrefix(name, "."+file+"-") {
			return true
		}
	}
	return false
}

// exitUnknown is the exit code of a process whose shim died before it, so that no parent could read its exit status.
const exitUnknown = -1

// writeFile replaces a file so that a reader, and a crash, see the old or the new content, whole.
func writeFile(dir, name string, v any) error {
	data, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("encode %s: %w", name, err)
	}
	f, err := os.CreateTemp(dir, "."+name+"-*") // mode 0600
	if err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	_, err = f.Write(data)
	err = errors.Join(err, f.Sync(), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), filepath.Join(dir, name))
	}
	if err == nil {
		err = syncDir(dir)
	}
	if err != nil {
		_ = os.Remove(f.Name())
		return fmt.Errorf("write %s: %w", name, err)
	}
	return nil
}

func syncDir(path string) error {
	d, err := os.Open(path) //nolint:gosec // the agent's own directory
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// readFile decodes a file into v. It returns false if there is no such file.
func readFile(dir, name string, v any) (bool, error) {
	data, err := os.ReadFile(filepath.Join(dir, name)) //nolint:gosec // the agent's own directory
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("read %s: %w", name, err)
	}
	if err := json.Unmarshal(data, v); err != nil {
		return false, fmt.Errorf("read %s: %w", name, err)
	}
	return true, nil
}
