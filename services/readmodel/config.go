// Package readmodel is the service that people use. It owns projections of the event log and people's sessions; it believes the event log and a live
// session; it writes no truth: commands go to their owners with a signed assertion of the person. Its root only wires.
package readmodel

import (
	"errors"
	"fmt"

	"github.com/gpuaas/mesh/internal/service"
	"github.com/gpuaas/mesh/services/readmodel/watch"
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
	TrustedOrigins   []string `koanf:"trusted_origins"`    // scheme://host[:port] of other sites whose pages may send requests and read answers; none by default
	Reflection       bool     `koanf:"reflection"`         // gRPC reflection for everybody who reaches the people's port; off by default
	AssertionKeyFile string   `koanf:"assertion_key_file"` // Ed25519; made at the first start, shared by replicas
	Peers            Peers    `koanf:"peers"`
	// Watches that are open at once on this replica. Each of the last three is a share of the first where it is 0.
	WatchStreams       int `koanf:"watch_streams"`        // in all
	WatchPersonStreams int `koanf:"watch_person_streams"` // of one person; by default 1/32 of all
	WatchTenantStreams int `koanf:"watch_tenant_streams"` // of one tenant; by default 1/8
	// Kept for people of the operator who hold the role operator or security; by default 1/4.
	WatchOperatorStreams int `koanf:"watch_operator_streams"`
}

func (c Config) watchLimits() watch.Limits {
	return watch.Limits{
		Streams: c.WatchStreams, Person: c.WatchPersonStreams,
		Tenant: c.WatchTenantStreams, Operators: c.WatchOperatorStreams,
	}
}

// Default returns the defaults.
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
	} else if err := c.watchLimits().Validate(); err != nil {
		errs = append(errs, fmt.Errorf("watch_person_streams, watch_tenant_streams, watch_operator_streams: %w", err))
	}
	for key, n := range map[string]int{
		"watch_person_streams": c.WatchPersonStreams, "watch_tenant_streams": c.WatchTenantStreams,
		"watch_operator_streams": c.WatchOperatorStreams,
	} {
		if n < 0 {
			errs = append(errs, fmt.Errorf("%s is below 0", key))
		}
	}
	return errors.Join(errs...)
}
