package service

import (
	"errors"
	"fmt"
	"time"

	"github.com/gpuaas/mesh/internal/config"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/retention"
)

// TLS locates the files of a service's own certificate.
type TLS struct {
	CertFile string `yaml:"cert_file"`
	KeyFile  string `yaml:"key_file"`
	CAFile   string `yaml:"ca_file"` // roots of the issuer of services, by which peers are verified
}

// Config is the part of a service's configuration that all share. Embed it.
type Config struct {
	// Service is the service that this file configures; empty: any service that reads it.
	Service          string            `yaml:"service"`
	Log              obs.LogConfig     `yaml:"log"`        // of a process of its own
	ReplicaID        string            `yaml:"replica_id"` // drawn at start if empty
	TrustDomain      string            `yaml:"trust_domain"`
	DatabaseURLFile  config.SecretFile `yaml:"database_url_file"`
	SequencerURLFile config.SecretFile `yaml:"sequencer_url_file"`
	DatabaseConns    int32             `yaml:"database_conns"`
	TLS              TLS               `yaml:"tls"`
	Listen           string            `yaml:"listen"`
	OpsListen        string            `yaml:"ops_listen"`
	DebugSocket      string            `yaml:"debug_socket"` // a unix socket for profiles; empty: none
	// RetentionSweep is the interval of the walks that delete rows at the end of their retention; nodeapi deletes none.
	RetentionSweep time.Duration `yaml:"retention_sweep"`
	// SeededDatabase allows a database whose fleet was loaded by a bench.
	SeededDatabase bool `yaml:"seeded_database"`
}

// Default returns the shared defaults.
func Default() Config {
	return Config{
		TrustDomain: "mesh.local", DatabaseConns: 16, Listen: "127.0.0.1:0", OpsListen: "127.0.0.1:0",
		RetentionSweep: retention.Every,
	}
}

// Validate returns an error that names everything that is missing.
func (c Config) Validate() error {
	var errs []error
	need := func(value, key string) {
		if value == "" {
			errs = append(errs, fmt.Errorf("%s is needed", key))
		}
	}
	need(c.TrustDomain, "trust_domain")
	need(string(c.DatabaseURLFile), "database_url_file")
	need(string(c.SequencerURLFile), "sequencer_url_file")
	need(c.TLS.CertFile, "tls.cert_file")
	need(c.TLS.KeyFile, "tls.key_file")
	need(c.TLS.CAFile, "tls.ca_file")
	need(c.OpsListen, "ops_listen")
	if c.ReplicaID != "" && !ids.Valid(c.ReplicaID) {
		errs = append(errs, errors.New("replica_id is not a UUID"))
	}
	if c.RetentionSweep < time.Second {
		errs = append(errs, errors.New("retention_sweep is shorter than a second"))
	}
	if c.DatabaseConns < 2 {
		errs = append(errs, errors.New("database_conns is below 2"))
	}
	return errors.Join(errs...)
}
