// Package nodeapi is the service that node agents are connected to. It owns open sessions and the beats of its
// replicas; it believes verified certificates, recovery's authority view and lifecycle's leases; it decides neither
// lifecycle nor identity. Its root only wires.
package nodeapi

import (
	"errors"
	"fmt"
	"time"

	"github.com/gpuaas/mesh/internal/service"
	"github.com/gpuaas/mesh/services/nodeapi/session"
	"github.com/gpuaas/mesh/services/nodeapi/session/skew"
)

// Peers are the services that nodeapi calls, as host:port.
type Peers struct {
	Recovery  string `yaml:"recovery"`
	Lifecycle string `yaml:"lifecycle"`
}

// Config of the service.
type Config struct {
	service.Config `yaml:",inline"`

	AgentListen string `yaml:"agent_listen"`
	// Advertise is the host:port at which other services reach this replica's internal port. Empty: the address it listens
	// at, with the name of the host if it listens on every address.
	Advertise  string `yaml:"advertise"`
	NodeCAFile string `yaml:"node_ca_file"` // the authorities of agents' certificates; read again when the file changes
	// JoinStatePubkeysFile holds the keys that join states are signed with. With them an agent is distinguished from
	// another holder of its key, so that the latter cannot use up the streams that the agent may open. Empty: this replica
	// cannot distinguish them.
	JoinStatePubkeysFile string        `yaml:"join_state_pubkeys_file"`
	Peers                Peers         `yaml:"peers"`
	DrainSpread          time.Duration `yaml:"drain_spread"`  // the time over which agents are asked to leave at shutdown
	DrainTimeout         time.Duration `yaml:"drain_timeout"` // the time after which the sessions that remain are cut
	// Limits of the agents' port.
	MaxConnections int           `yaml:"max_connections"`
	OpenBurst      int           `yaml:"open_burst"`
	OpenEvery      time.Duration `yaml:"open_every"`
	// FirstFrame is how long a stream may take to its Hello, ChallengeWithin to the answer of a challenge.
	FirstFrame      time.Duration `yaml:"first_frame"`
	ChallengeWithin time.Duration `yaml:"challenge_within"`
	FramesPerSecond int           `yaml:"frames_per_second"` // of one session; more end it
	// KeepaliveInterval is how long a connection may be silent before it is asked whether its other end is there.
	KeepaliveInterval time.Duration `yaml:"keepalive_interval"`
	// ClockTolerance is the difference between a host's clock and the database's from which it is reported.
	ClockTolerance time.Duration `yaml:"clock_tolerance"`
	// RetiredFor is how long a replica keeps a retired node in its authority view, longer than any certificate lives.
	RetiredFor time.Duration `yaml:"retired_for"`
	// ForgetAfter is how long the newest observations of a node stay after its last session began. It is longer than a
	// session lives (node.stream_max_age_seconds and a fifth).
	ForgetAfter time.Duration `yaml:"forget_after"`
}

// Default returns the defaults.
func Default() Config {
	return Config{
		Config: service.Default(), AgentListen: "127.0.0.1:0", DrainSpread: 2 * time.Second, DrainTimeout: 10 * time.Second,
		MaxConnections: 16384, OpenBurst: 3, OpenEvery: 10 * time.Second,
		FirstFrame: 5 * time.Second, ChallengeWithin: 5 * time.Second, FramesPerSecond: 2000, RetiredFor: 49 * time.Hour,
		ForgetAfter: 72 * time.Hour, ClockTolerance: skew.Tolerance, KeepaliveInterval: 15 * time.Second,
	}
}

// Limits returns the limits of the agents' port.
func (c Config) Limits() session.Limits {
	return session.Limits{
		MaxConnections: c.MaxConnections, OpenBurst: c.OpenBurst, OpenEvery: c.OpenEvery,
		FirstFrame: c.FirstFrame, Challenge: c.ChallengeWithin, FramesPerSecond: c.FramesPerSecond,
		ClockTolerance: c.ClockTolerance, KeepaliveInterval: c.KeepaliveInterval,
	}
}

// Validate reports everything that is wrong with this part; the shared part reports for itself.
func (c Config) Validate() error {
	var errs []error
	for key, v := range map[string]string{
		"agent_listen": c.AgentListen, "node_ca_file": c.NodeCAFile, "peers.recovery": c.Peers.Recovery,
		"peers.lifecycle": c.Peers.Lifecycle,
	} {
		if v == "" {
			errs = append(errs, fmt.Errorf("%s is needed", key))
		}
	}
	if c.MaxConnections < 1 {
		errs = append(errs, errors.New("max_connections is below 1"))
	}
	if c.OpenBurst < 1 || c.OpenEvery <= 0 {
		errs = append(errs, errors.New("open_burst and open_every are above zero"))
	}
	if c.FirstFrame <= 0 || c.ChallengeWithin <= 0 || c.FramesPerSecond < 1 {
		errs = append(errs, errors.New("first_frame, challenge_within and frames_per_second are above zero"))
	}
	if c.ClockTolerance <= 0 || c.KeepaliveInterval <= 0 {
		errs = append(errs, errors.New("clock_tolerance and keepalive_interval are above zero"))
	}
	if c.DrainSpread < 0 || c.DrainTimeout < 0 {
		errs = append(errs, errors.New("drain_spread and drain_timeout are not negative"))
	}
	if c.ForgetAfter < time.Minute || c.RetiredFor < time.Minute {
		errs = append(errs, errors.New("forget_after and retired_for are not below a minute"))
	}
	return errors.Join(errs...)
}
