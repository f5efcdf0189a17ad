// Package readmodel is the service that people use. It owns projections of the event log and people's sessions; it believes the event log and a live
// session; it writes no truth: commands go to their owners with a signed assertion of the person. Its root only wires.
package readmodel

import (
	"errors"
	"fmt"

	"github.com/gpuaas/mesh/internal/service"
)

// Peers are the services that readmodel calls, as host:port.
type Peers struct {
	Recovery  string `koanf:"recovery"`
	Lifecycle string `koanf:"lifecycle"`
}

// Config of the service. The shared `listen` is not used: no service calls readmodel.
type Config struct {
	service.Config

	PeopleListen     string   `koanf:"people_listen"`      // Connect, gRPC and gRPC-Web over TLS
	PeopleHosts      []string `koanf:"people_hosts"`       // names and addresses that the service certificate must be good for
	TrustedOrigins   []string `koanf:"trusted_origins"`    // scheme://host[:port] of other sites whose pages may send requests; none by default
	AssertionKeyFile string   `koanf:"assertion_key_file"` // Ed25519; made at the first start, shared by replicas
	Peers            Peers    `koanf:"peers"`
	WatchStreams     int      `koanf:"watch_streams"` // open at once on this replica
}

// Default answers the defaults.
func Default() Config {
	return Config{Config: service.Default(), PeopleListen: "127.0.0.1:0", WatchStreams: 1024}
}

// Validate reports everything that is wrong with this part; the shared part reports for itself.
func (c Config) Validate() error {
	var errs []error
	for _, need := range []struct{ key, value string }{
		{"people_listen", c.PeopleListen},
		{"assertion_key_file", c.AssertionKeyFile},
		{"peers.recovery", c.Peers.Recovery},
		{"peers.lifecycle", c.Peers.Lifecycle},
	} {
		if need.value == "" {
			errs = append(errs, fmt.Errorf("%s is needed", need.key))
		}
	}
	if c.WatchStreams < 1 {
		errs = append(errs, errors.New("watch_streams is below 1"))
	}
	return errors.Join(errs...)
}
