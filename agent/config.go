package agent

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"time"

	"github.com/gpuaas/mesh/agent/identity/enrol"
	"github.com/gpuaas/mesh/agent/session"
	"github.com/gpuaas/mesh/internal/config"
)

// The directories of an installed agent.
const (
	DefaultEtcDir   = "/etc/gpuaas"
	DefaultStateDir = "/var/lib/gpuaas"
	// DefaultUIDDir is shared by all agents of a host, so that no two of them give one uid to two workspaces.
	DefaultUIDDir = "/var/lib/gpuaas-uids"
)

// Config configures an agent. Zero fields take the defaults named here.
type Config struct {
	EtcDir   string // default DefaultEtcDir
	StateDir string // default DefaultStateDir
	// WorkDir has the parts of the host that workspaces see: storage and working directories. Every directory above it
	// must be open to traversal by others. Default: `workspaces` in StateDir.
	WorkDir string
	UIDDir  string // default DefaultUIDDir; unused without root

	SimulatedGPUs int    // declared instead of found; zero: the host is scanned for real ones
	OpsListen     string // loopback host:port for metrics and health; empty: none
	Version       string // of this build

	// KeepCorruptLedger makes a task ledger that cannot be read an error. Else it is set aside and a new one begins: the
	// control plane sees another ledger id, and asks what became of the tasks that had been started.
	KeepCorruptLedger bool

	Session session.Config
	Enrol   enrol.Config

	FactsEvery   time.Duration // between two scans of the host. Default 60 s
	RoomEvery    time.Duration // between two checks for room on the disks. Default 5 s
	ObserveEvery time.Duration // between two full observations of the workloads. Default 60 s
	ObserveLeast time.Duration // between two observations because of changes. Default 500 ms
	SlowRetry    time.Duration // where only an operator can help. Default 60 s
	TrustEvery   time.Duration // between two reads of the trust bundle's file. Default 10 s
	ReportLeast  time.Duration // between two reports of diagnostics. Default 5 s
	// ProfileWithin is how long an offered profile that was taken may go without an admitted session until the former one
	// is back. Default 2 min
	ProfileWithin time.Duration
	AliveEvery    time.Duration // between two signs of life while the control plane cannot be reached. Default 5 min

	// JournalSocket is where the host's journal listens, which gets each diagnostic too; empty: none does.
	JournalSocket string
}

// Default returns the configuration of an installed agent.
func Default() Config { return Config{}.withDefaults() }

func (c Config) withDefaults() Config {
	c = config.Or(c, Config{
		EtcDir: DefaultEtcDir, StateDir: DefaultStateDir, UIDDir: DefaultUIDDir, Version: "dev", FactsEvery: time.Minute,
		RoomEvery: 5 * time.Second, ObserveEvery: time.Minute, ObserveLeast: 500 * time.Millisecond, SlowRetry: time.Minute,
		TrustEvery: 10 * time.Second, ReportLeast: 5 * time.Second, AliveEvery: 5 * time.Minute,
		ProfileWithin: 2 * time.Minute,
	})
	c.WorkDir = cmp.Or(c.WorkDir, filepath.Join(c.StateDir, "workspaces"))
	return c
}

// ConfigError reports all problems of a Config.
type ConfigError struct{ Problems error }

// Error lists the problems.
func (e *ConfigError) Error() string { return "configuration: " + e.Problems.Error() }

// Unwrap returns the problems.
func (e *ConfigError) Unwrap() error { return e.Problems }

// Validate returns every problem of c, joined; nil if there is none.
func (c Config) Validate() error {
	var problems []error
	for _, dir := range []struct{ name, path string }{
		{"etc directory", c.EtcDir},
		{"state directory", c.StateDir},
		{"work directory", c.WorkDir},
		{"uid directory", c.UIDDir},
	} {
		if !filepath.IsAbs(dir.path) {
			problems = append(problems, fmt.Errorf("%s %q is not absolute", dir.name, dir.path))
			continue
		}
		if info, err := os.Stat(dir.path); err == nil && !info.IsDir() {
			problems = append(problems, fmt.Errorf("%s %s is not a directory", dir.name, dir.path))
		}
	}
	if filepath.Clean(c.EtcDir) == filepath.Clean(c.StateDir) {
		problems = append(problems, errors.New("etc and state directory are the same"))
	}
	const mostGPUs = 64
	if c.SimulatedGPUs < 0 || c.SimulatedGPUs > mostGPUs {
		problems = append(problems, fmt.Errorf("%d simulated GPUs: 0 to %d can be declared", c.SimulatedGPUs, mostGPUs))
	}
	for _, every := range []struct {
		name string
		time time.Duration
	}{
		{"between scans of the host", c.FactsEvery},
		{"between checks for room", c.RoomEvery},
		{"between observations", c.ObserveEvery},
		{"between observations of changes", c.ObserveLeast},
		{"between slow retries", c.SlowRetry},
		{"between reads of the trust bundle", c.TrustEvery},
		{"until a former profile is back", c.ProfileWithin},
	} {
		if every.time < 0 {
			problems = append(problems, fmt.Errorf("the time %s is negative: %s", every.name, every.time))
		}
	}
	if c.OpsListen != "" {
		host, _, err := net.SplitHostPort(c.OpsListen)
		if ip := net.ParseIP(host); err != nil || (host != "localhost" && (ip == nil || !ip.IsLoopback())) {
			problems = append(problems, fmt.Errorf("ops address %q is not host:port of the loopback interface", c.OpsListen))
		}
	}
	return errors.Join(problems...)
}
