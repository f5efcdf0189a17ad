package drive

import (
	"errors"
	"fmt"
	"time"

	"github.com/gpuaas/mesh/internal/config"
)

// Config bounds a driver. Zero fields take the defaults.
type Config struct {
	// Owner is the name of this driver in leases: the replica's id. No two running drivers have the same.
	Owner string `yaml:"owner"`
	// Workers is how many runs the driver drives at once.
	Workers int `yaml:"workers"`
	// LeaseBatch is how many runs one transaction leases.
	LeaseBatch int `yaml:"lease_batch"`
	// Lease is how long a driver keeps a run without a heartbeat; after it another driver may lease the run.
	Lease time.Duration `yaml:"lease"`
	// Heartbeat is how often all leases are extended, in one statement.
	Heartbeat time.Duration `yaml:"heartbeat"`
	// Poll is how long an unwoken driver sleeps.
	Poll time.Duration `yaml:"poll"`
	// CancelGrace is how long a step may go on after its run was cancelled or its budget used up, before its attempt is
	// abandoned. A stopping driver waits for StopGrace instead.
	CancelGrace time.Duration `yaml:"cancel_grace"`
	// GraceNow, if set, is called for the grace each time a step is cancelled or past its budget, and replaces
	// CancelGrace.
	GraceNow func() time.Duration `yaml:"-"`
	// StopGrace is how long a stopping driver waits for its steps.
	StopGrace time.Duration `yaml:"stop_grace"`
	// StallSweep is how often the driver scans for stalls.
	StallSweep time.Duration `yaml:"stall_sweep"`
	// MaxLosses is how many drivers in a row may be lost at one step before the step counts as failed: a step that kills
	// its driver must not do so for ever.
	MaxLosses int `yaml:"max_losses"`
}

// Default is the configuration of a production driver.
func Default() Config {
	return Config{
		Workers: 16, LeaseBatch: 16, Lease: 15 * time.Second, Heartbeat: 5 * time.Second, Poll: time.Second,
		CancelGrace: 30 * time.Second, StopGrace: 5 * time.Second, StallSweep: 5 * time.Second, MaxLosses: 10,
	}
}

func (c Config) grace() time.Duration {
	if c.GraceNow != nil {
		return c.GraceNow()
	}
	return c.CancelGrace
}

// Validate reports every problem at once.
func (c Config) Validate() error {
	c = config.Or(c, Default())
	var problems []error
	if c.Owner == "" {
		problems = append(problems, errors.New("owner is empty"))
	}
	if c.Workers < 1 || c.LeaseBatch < 1 || c.MaxLosses < 1 {
		problems = append(problems, errors.New("workers, lease_batch and max_losses are at least 1"))
	}
	if c.Lease < 3*c.Heartbeat {
		problems = append(problems, fmt.Errorf("lease %s is shorter than three heartbeats of %s", c.Lease, c.Heartbeat))
	}
	if min(c.Heartbeat, c.Poll, c.CancelGrace, c.StopGrace, c.StallSweep) < 0 {
		problems = append(problems, errors.New("a duration is negative"))
	}
	return errors.Join(problems...)
}
