// Package dev is a whole mesh in one process, for one person on one machine: the four services, built by the
// constructors that a process of each service uses, talking to each other over mutual TLS on loopback; Postgres, Redis
// and node agents as child processes.
//
// It owns a data directory, under a lock. It keeps what exists there: identities, keys and data are made once and used
// again. It is no production mesh: its authorities' keys are in files beside the data. Guarantees: every process that
// it starts ends with it, workloads included; after its own sudden death the next one on the same directory continues
// from there.
package dev

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/gpuaas/mesh/devstack/inuse"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/internal/ports"
)

// The default addresses of a mesh of one's own.
const (
	DefaultConsoleAddr = "127.0.0.1:8443"
	DefaultNodeAddr    = "127.0.0.1:8444"
	DefaultEnrollAddr  = "127.0.0.1:8445"
	DefaultMetricsAddr = "127.0.0.1:9090"
)

const mostNodes = 64

// Config is what a person may configure.
type Config struct {
	DataDir     string // empty: DefaultDataDir, or a temporary one if Ephemeral
	Ephemeral   bool   // a directory that is removed at the end, and free ports
	Nodes       int
	PolicyFile  string
	DatabaseURL string
	RedisURL    string
	AgentBinary string
	NoDemo      bool
	Statements  bool // our Postgres counts what each statement costs, if it can
	// IdleConns is for how long the services keep a connection to our Postgres that they do not use; zero: their default.
	IdleConns time.Duration
	// RetentionSweep is how often history is cut; zero: the default of the services.
	RetentionSweep time.Duration
	// ForgetAfter is how long recovery and nodeapi keep what has ended in working tables and memory, and how long the
	// secret of a launched instance is good; zero: the defaults of the services.
	ForgetAfter time.Duration
	// KeepEnded is how long the files of an ended instance stay on its host; zero: the default of lifecycle.
	KeepEnded time.Duration
	// SeededDatabase allows a database whose fleet was loaded by a bench.
	SeededDatabase bool

	// Empty: the default, or a free port if Ephemeral.
	ConsoleAddr, NodeAddr, EnrollAddr, MetricsAddr string
}

// DefaultDataDir returns a path in the person's data directory; as root one in /var/lib, because servers and workloads
// then run as other users, who cannot enter root's home.
func DefaultDataDir() (string, error) {
	if os.Getuid() == 0 {
		return "/var/lib/gpuaas/dev", nil
	}
	if dir := os.Getenv("XDG_DATA_HOME"); filepath.IsAbs(dir) {
		return filepath.Join(dir, "gpuaas", "dev"), nil
	}
	home, err := os.UserHomeDir()
	if err != nil {
		return "", fmt.Errorf("find home directory: %w; name a directory with --data-dir", err)
	}
	return filepath.Join(home, ".local", "share", "gpuaas", "dev"), nil
}

// CacheDir returns the directory in which `make postgres` installs a Postgres.
func CacheDir() string {
	if os.Getuid() == 0 {
		return "/var/cache/gpuaas/postgres"
	}
	dir, err := os.UserCacheDir()
	if err != nil {
		return ""
	}
	return filepath.Join(dir, "gpuaas", "postgres")
}

// ConfigError lists everything that is wrong with a configuration.
type ConfigError struct{ Problems []error }

func (e *ConfigError) Error() string { return errors.Join(e.Problems...).Error() }

// Unwrap returns the problems.
func (e *ConfigError) Unwrap() []error { return e.Problems }

// completeConfig is a configuration with all defaults filled in.
type completeConfig struct {
	Config

	policy map[string]string
	agent  string
}

// complete fills in the defaults and reports every problem.
func (c *Config) complete(find func(string) (string, error)) (completeConfig, error) {
	var problems []error
	for _, addr := range []struct {
		value *string
		usual string
	}{
		{&c.ConsoleAddr, DefaultConsoleAddr},
		{&c.NodeAddr, DefaultNodeAddr},
		{&c.EnrollAddr, DefaultEnrollAddr},
		{&c.MetricsAddr, DefaultMetricsAddr},
	} {
		switch {
		case *addr.value != "":
		case c.Ephemeral:
			*addr.value = "127.0.0.1:0"
		default:
			*addr.value = addr.usual
		}
	}
	for _, addr := range c.addresses() {
		host, _, err := net.SplitHostPort(*addr.value)
		if err != nil {
			problems = append(problems, fmt.Errorf("%s %q is not host:port", addr.flag, *addr.value))
		} else if host == "" {
			problems = append(problems, fmt.Errorf("%s %q names no host: agents and clients must be told one", addr.flag,
				*addr.value))
		}
	}
	if c.Nodes < 0 || c.Nodes > mostNodes {
		problems = append(problems, fmt.Errorf("--nodes %d: 0 to %d run here", c.Nodes, mostNodes))
	}
	if c.Ephemeral && c.DataDir != "" {
		problems = append(problems, errors.New("--ephemeral makes its own directory: leave out --data-dir"))
	}
	out := completeConfig{policy: map[string]string{}}
	var err error
	if c.PolicyFile != "" {
		if out.policy, err = policy.LoadFile(c.PolicyFile); err != nil {
			problems = append(problems, fmt.Errorf("--policy %s: %w", c.PolicyFile, err))
		}
	}
	if out.agent, err = find(c.AgentBinary); err != nil {
		problems = append(problems, err)
	}
	if c.DataDir == "" && !c.Ephemeral {
		if c.DataDir, err = DefaultDataDir(); err != nil {
			problems = append(problems, err)
		}
	}
	out.Config = *c
	if len(problems) > 0 {
		return out, &ConfigError{Problems: problems}
	}
	return out, nil
}

// address is the address of a flag.
type address struct {
	flag  string
	value *string
}

func (c *Config) addresses() []address {
	return []address{
		{"--console-addr", &c.ConsoleAddr},
		{"--node-addr", &c.NodeAddr},
		{"--enroll-addr", &c.EnrollAddr},
		{"--metrics-addr", &c.MetricsAddr},
	}
}

// claim checks the addresses, all of them, and puts free ports in the place of zeros.
func (c *Config) claim(ctx context.Context) error {
	var problems []error
	seen := map[string]string{}
	free, err := ports.Free(ctx, len(c.addresses()))
	if err != nil {
		return err
	}
	for i, addr := range c.addresses() {
		if host, port, err := net.SplitHostPort(*addr.value); err == nil && port == "0" {
			_, port, err = net.SplitHostPort(free[i])
			problems = append(problems, err)
			*addr.value = net.JoinHostPort(host, port)
		}
		if other, ok := seen[*addr.value]; ok {
			problems = append(problems, fmt.Errorf("%s and %s are both %s", other, addr.flag, *addr.value))
			continue
		}
		seen[*addr.value] = addr.flag
		problems = append(problems, inuse.Check(ctx, addr.flag, *addr.value))
	}
	if problems = slices.DeleteFunc(problems, func(err error) bool { return err == nil }); len(problems) > 0 {
		return &AddressError{Problems: problems}
	}
	return nil
}

// AddressError lists the addresses that cannot be used.
type AddressError struct{ Problems []error }

func (e *AddressError) Error() string { return errors.Join(e.Problems...).Error() }

// Unwrap returns the problems.
func (e *AddressError) Unwrap() []error { return e.Problems }

// hosts returns the hosts that the services' certificates must name beside the loopback addresses.
func (c *Config) hosts() []string {
	var out []string
	for _, addr := range c.addresses() {
		host, _, err := net.SplitHostPort(*addr.value)
		if err != nil || host == "localhost" || slices.Contains(out, host) {
			continue
		}
		if ip := net.ParseIP(host); ip != nil && (ip.IsLoopback() || ip.IsUnspecified()) {
			continue
		}
		out = append(out, host)
	}
	return out
}
