// Package readmodel is the service that people use. It owns projections of the event log and people's sessions. It
// trusts the event log and a live session. It changes no other service's state: it forwards a command to the owner,
// with a signed assertion of the person. The root package only wires.
package readmodel

import (
	"errors"
	"fmt"

	"github.com/gpuaas/mesh/internal/service"
	"github.com/gpuaas/mesh/services/readmodel/watch"
)

// Peers are the services that readmodel calls, as host:port.
type Peers struct {
	Recovery  string `yaml:"recovery"`
	Lifecycle string `yaml:"lifecycle"`
}

// Config of the service. The shared `listen` is not used: no service calls readmodel.
type Config struct {
	service.Config `yaml:",inline"`

	PeopleListen string `yaml:"people_listen"` // Connect, gRPC and gRPC-Web over TLS
	// names and addresses that the service certificate must be good for
	PeopleHosts []string `yaml:"people_hosts"`
	// scheme://host[:port] of other sites whose pages may send requests and read answers; none by default
	TrustedOrigins []string `yaml:"trusted_origins"`
	// gRPC reflection for every caller that reaches the people's port; off by default
	Reflection       bool   `yaml:"reflection"`
	AssertionKeyFile string `yaml:"assertion_key_file"` // Ed25519; made at the first start, shared by replicas
	Peers            Peers  `yaml:"peers"`
	// Watches that are open at once on this replica. Each of the last three is a share of the first where it is 0.
	WatchStreams       int `yaml:"watch_streams"`        // in all
	WatchPersonStreams int `yaml:"watch_person_streams"` // of one person; by default 1/32 of all
	WatchTenantStreams int `yaml:"watch_tenant_streams"` // of one tenant; by default 1/8
	// Kept for people of the operator who hold the role operator or security; by default 1/4.
	WatchOperatorStreams int `yaml:"watch_operator_streams"`
}

func (c Config) watchLimits() watch.Limits {
	return watch.Limits{
		Streams: c.WatchStreams, Person: c.WatchPersonStreams,
		Tenant: c.WatchTenantStreams, Operators: c.WatchOperatorStreams,
	}
}

// Default returns the default configuration.
func Default() Config {
	return Config{Config: service.Default(), PeopleListen: "127.0.0.1:0", WatchStreams: 1024}
}

// Validate returns all problems of this part, joined. It does not check the embedded shared part.
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
