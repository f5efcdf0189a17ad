package process

import (
	"log/slog"
	"os"
	"time"

	"github.com/gpuaas/mesh/agent/runtime/isolation"
	"github.com/gpuaas/mesh/agent/runtime/uid"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
)

// DefaultGrace is the time between TERM and KILL.
const DefaultGrace = 10 * time.Second

// Config sets where workloads have their files, and their bounds. Zero values take the defaults named here.
type Config struct {
	// StateDir has specs, states, secrets and outputs. It is the agent's own, mode 0700.
	StateDir string
	// WorkDir holds the working directories of workloads without storage, and a copy of the agent's binary for demo
	// workloads. Workspaces must be able to traverse it, so no directory above it may be closed to others.
	WorkDir string
	// Executable runs shims. Default: this process's own binary.
	Executable string
	// NoRoot keeps the agent from giving workspaces their own uid. Default: whether the process is not root. Only tests of
	// that case set it.
	NoRoot bool
	// Cgroups are the control groups in which workloads run; see isolation.DetectCgroups.
	Cgroups isolation.Cgroups

	MaxPIDs    int           // of one workload. Default 4096
	LogBytes   int64         // of one output before it is rotated; one older piece is kept. Default 8 MiB
	BackoffMin time.Duration // before a restart. Default 1 s, doubled up to BackoffMax, 1 min
	BackoffMax time.Duration
	StartWait  time.Duration // for a shim's first report. Default 60 s
	CheckEvery time.Duration // of shims and states. Default 1 s
	CalmAfter  time.Duration // a run of this length does not count towards a crash loop. Default 1 min
	// GPUs of the host, to keep a workload from those it was not given, where the host can.
	GPUs []*commonv1.Gpu
}

var defaults = Config{
	Executable: selfExecutable, MaxPIDs: 4096, LogBytes: 8 << 20, BackoffMin: time.Second, BackoffMax: time.Minute,
	StartWait: time.Minute, CheckEvery: time.Second, CalmAfter: calmAfter, NoRoot: os.Getuid() != 0,
}

// Deps are what a Runtime needs.
type Deps struct {
	Logger *slog.Logger
	UIDs   *uid.Table
}

// DefaultCrashLoopRestarts is how many restarts make a crash loop until the control plane has sent its policy.
const DefaultCrashLoopRestarts = 3
