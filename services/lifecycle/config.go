// Package lifecycle is the service that owns tenants, workspaces and all that makes them: saga runs, instances,
// allocations, node gates and tasks. It trusts nodeapi's reports of tasks and recovery's fences; it does not classify
// drift and does not touch identity. Its root only wires.
package lifecycle

import (
	"errors"
	"fmt"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/config"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/service"
	"github.com/gpuaas/mesh/services/lifecycle/allocation"
	"github.com/gpuaas/mesh/services/lifecycle/findings"
	"github.com/gpuaas/mesh/services/lifecycle/placement/process"
	"github.com/gpuaas/mesh/services/lifecycle/saga/drive"
	"github.com/gpuaas/mesh/services/lifecycle/spec"
	"github.com/gpuaas/mesh/services/lifecycle/tenants"
)

// Peers are the services that lifecycle calls, as host:port.
type Peers struct {
	Recovery string `yaml:"recovery"`
}

// Static configures placement on machines that were enrolled before.
type Static struct {
	SlotsPerNode int32 `yaml:"slots_per_node"`
}

// Placement configures the drivers. The process driver is offered if it has a directory.
type Placement struct {
	Process process.Config `yaml:"process"`
	Static  Static         `yaml:"static"`
}

// Config of the service.
type Config struct {
	service.Config `yaml:",inline"`

	TaskSigningKeyFile string `yaml:"task_signing_key_file"`
	// TaskSigningPubkeysFile names further keys that signed tasks. An agent's report of an attempt that the database has
	// lost counts if one of them, or the signing key itself, signed it. Empty: the signing key alone.
	TaskSigningPubkeysFile string `yaml:"task_signing_pubkeys_file"`
	JoinStatePubkeysFile   string `yaml:"join_state_pubkeys_file"`
	AssertionPubkeysFile   string `yaml:"assertion_pubkeys_file"`
	// SecretFile is the file of the secret from which launch secrets and workloads' passwords are derived.
	SecretFile config.SecretFile `yaml:"secret_file"`
	// WorkloadSecretsKeysFile is the file of the keys with which environment values of workloads are sealed, one a line;
	// the first key seals, all open.
	WorkloadSecretsKeysFile config.SecretFile `yaml:"workload_secrets_keys_file"`
	// WorkloadSecretsLostKeys are the ids of keys that are lost. The service does not start if stored values need a key
	// that is neither in the file nor listed here.
	WorkloadSecretsLostKeys []string          `yaml:"workload_secrets_lost_keys"`
	WorkloadDatabaseURL     config.SecretFile `yaml:"workload_database_url_file"`
	// RedisURLFile is the file of the lock store's URL; empty: no lock store, and joins cost a little more.
	RedisURLFile     config.SecretFile    `yaml:"redis_url_file"`
	Plans            map[string]spec.Plan `yaml:"plans"`
	Regions          []string             `yaml:"regions"`
	DefaultPlacement string               `yaml:"default_placement"`
	DefaultQuota     tenants.Quota        `yaml:"default_quota"`
	Placement        Placement            `yaml:"placement"`
	Peers            Peers                `yaml:"peers"`
	Workers          int                  `yaml:"workers"` // sagas driven at once
	// SagaLease is how long a run stays with a replica that sends no heartbeat.
	SagaLease time.Duration `yaml:"saga_lease"`
	// OrphanSweep is how often a sweep scans for instances without an owner.
	OrphanSweep time.Duration `yaml:"orphan_sweep"`
	// ReleaseDeadline is how long a release may take before its allocation is release_failed.
	ReleaseDeadline time.Duration `yaml:"release_deadline"`
	// FindingSweep is how often rows and resources are compared.
	FindingSweep time.Duration `yaml:"finding_sweep"`
	// WokenSweep is how often findings are made of ended instances that were started again.
	WokenSweep time.Duration `yaml:"woken_sweep"`
	// FindingGrace is how long a contradiction must last to be a finding.
	FindingGrace time.Duration `yaml:"finding_grace"`
}

// Default returns the defaults.
func Default() Config {
	return Config{
		Config: service.Default(), Regions: []string{"local"}, DefaultPlacement: "static", Workers: 16,
		SagaLease: drive.Default().Lease, OrphanSweep: 30 * time.Second,
		ReleaseDeadline: allocation.ReleaseDeadline,
		FindingSweep:    30 * time.Second, WokenSweep: 5 * time.Second, FindingGrace: findings.Default().Grace,
		Plans: map[string]spec.Plan{
			"local": {MaxGPUs: 8, MaxStorageBytes: 100 << 30, MaxWorkloads: 8},
			"small": {MaxGPUs: 1, MaxStorageBytes: 10 << 30, MaxWorkloads: 2},
		},
		DefaultQuota: tenants.Quota{Workspaces: 100, GPUs: 64, StorageBytes: 1 << 40},
		Placement:    Placement{Static: Static{SlotsPerNode: 4}, Process: process.Config{MaxInstances: 128, MaxGPUs: 64}},
	}
}

// Validate reports everything that is wrong with this part.
func (c Config) Validate() error {
	var errs []error
	for key, v := range map[string]string{
		"task_signing_key_file": c.TaskSigningKeyFile, "join_state_pubkeys_file": c.JoinStatePubkeysFile,
		"assertion_pubkeys_file": c.AssertionPubkeysFile, "secret_file": string(c.SecretFile),
		"workload_secrets_keys_file": string(c.WorkloadSecretsKeysFile),
		"workload_database_url_file": string(c.WorkloadDatabaseURL), "peers.recovery": c.Peers.Recovery,
	} {
		if v == "" {
			errs = append(errs, fmt.Errorf("%s is needed", key))
		}
	}
	if len(c.Plans) == 0 || len(c.Regions) == 0 {
		errs = append(errs, errors.New("plans and regions are not empty"))
	}
	if _, err := names.Parse[commonv1.PlacementDriver](c.DefaultPlacement); err != nil {
		errs = append(errs, fmt.Errorf("default_placement: %w", err))
	}
	if p := c.Placement.Process; p.Dir != "" {
		for key, v := range map[string]string{
			"agent_binary": p.AgentBinary, "enroll_url": p.EnrollURL, "api_url": p.APIURL,
			"ca_file": p.CAFile,
		} {
			if v == "" {
				errs = append(errs, fmt.Errorf("placement.process.%s is needed where placement.process.dir is set", key))
			}
		}
	}
	if c.SagaLease < time.Second {
		errs = append(errs, errors.New("saga_lease is shorter than a second"))
	}
	if c.ReleaseDeadline < time.Second {
		errs = append(errs, errors.New("release_deadline is shorter than a second"))
	}
	if c.OrphanSweep < time.Second {
		errs = append(errs, errors.New("orphan_sweep is shorter than a second"))
	}
	if c.FindingSweep < time.Second || c.FindingGrace < time.Second || c.WokenSweep < time.Second {
		errs = append(errs, errors.New("finding_sweep, finding_grace or woken_sweep is shorter than a second"))
	}
	if c.Workers < 1 {
		errs = append(errs, errors.New("workers is below 1"))
	}
	return errors.Join(errs...)
}
