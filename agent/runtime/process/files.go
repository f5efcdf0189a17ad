package process

import (
	"time"

	"github.com/gpuaas/mesh/agent/runtime/procfs"
)

// The files of a workload's directory. Agent and shim each write their own and only read the other's.
const (
	fileSpec    = "spec.json"    // by the agent: what to run
	fileDesired = "desired.json" // by the agent: whether to run it
	fileState   = "state.json"   // by the shim: the state of the workload
	fileLock    = "shim.lock"    // locked by the shim as long as it lives
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
	Phase     string         `json:"phase"`
	Run       string         `json:"run"` // marks the processes of one start, in their environment
	BootID    string         `json:"boot_id"`
	Shim      procfs.Process `json:"shim"`
	Child     procfs.Process `json:"child"`
	StartedAt time.Time      `json:"started_at"`
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
		since = s.Child.Started()
	}
	return max(procfs.SinceBoot()-since, 0)
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

// exitUnknown is the exit code of a process whose shim died before it, so that no parent could read its exit status.
const exitUnknown = -1
