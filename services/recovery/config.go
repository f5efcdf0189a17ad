// Package recovery is the service that owns node identities. Its subpackages decide: identity (sessions, serials,
// fences), enrol (certificates), authority (nodeapi's view), policyadmin (policy keys), watchdog (recoveries,
// incidents, the brake). Its root only wires.
package recovery

import (
	"errors"
	"fmt"
	"net/url"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/config"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/replicas"
	"github.com/gpuaas/mesh/internal/service"
	"github.com/gpuaas/mesh/services/recovery/drift/collect"
)

// Peers are the services that recovery calls, as host:port.
type Peers struct {
	Lifecycle string `yaml:"lifecycle"`
}

// Profile is the profile that agents are sent: the addresses of the control plane and the authorities to trust.
type Profile struct {
	Name        string `yaml:"name"`
	APIURL      string `yaml:"api_url"`      // host:port or https URL of the node API, without a path
	RecoveryURL string `yaml:"recovery_url"` // URL of the enrolment listener
	TerminalURL string `yaml:"terminal_url"` // may be empty
	CAFile      string `yaml:"ca_file"`      // the certificate authorities of services, which agents trust
}

// CAProcess is a node authority that runs as a step-ca process of its own.
type CAProcess struct {
	URL         string `yaml:"url"`         // https://host:port; empty: the embedded authority of ca_dir signs
	RootsFile   string `yaml:"roots_file"`  // PEM roots that verify the process
	Provisioner string `yaml:"provisioner"` // the name of its JWK provisioner; empty: gpuaas
	KeyFile     string `yaml:"key_file"`    // PEM key of the provisioner
}

// Config of the service.
type Config struct {
	service.Config `yaml:",inline"`

	EnrollListen string `yaml:"enroll_listen"` // the port has server TLS only; empty: this replica serves no enrolment
	CADir        string `yaml:"ca_dir"`        // the embedded node authority's keys, shared by replicas
	// CAProcess is the node authority as a step-ca process, in place of the embedded one.
	CAProcess CAProcess `yaml:"ca_process"`
	// CADatabaseURLFile names the authority's own database, which remembers used tokens and issued certificates; may be
	// empty.
	CADatabaseURLFile config.SecretFile `yaml:"ca_database_url_file"`
	JoinStateKeys     string            `yaml:"join_state_keys"` // directory of private keys, shared by replicas
	Profile           Profile           `yaml:"profile"`
	// TaskSigningPubkeysFile has the public keys of tasks that this replica trusts. Agents are sent at enrolment the keys
	// that follow from them, with those of later rotations.
	TaskSigningPubkeysFile string `yaml:"task_signing_pubkeys_file"`
	AssertionPubkeysFile   string `yaml:"assertion_pubkeys_file"` // verifies on whose behalf readmodel calls
	Peers                  Peers  `yaml:"peers"`

	// Limits of enrolment; zero means the default.
	EnrollPerSecond      float64       `yaml:"enroll_per_second"`
	EnrollBurst          int           `yaml:"enroll_burst"`
	EnrollPerTokenSecond float64       `yaml:"enroll_per_token_second"`
	EnrollPerTokenBurst  int           `yaml:"enroll_per_token_burst"`
	ClaimLease           time.Duration `yaml:"claim_lease"`
	// MintWait is the wait before another key of an instance may use a launch secret whose first certificate was never
	// used.
	MintWait   time.Duration `yaml:"mint_wait"`
	SweepEvery time.Duration `yaml:"sweep_every"`
	// LaunchSecretLife is how long an instance may take to register.
	LaunchSecretLife time.Duration `yaml:"launch_secret_life"`
	// RetiredFor is how long replicas of nodeapi learn of a retired node, longer than any certificate lives.
	RetiredFor time.Duration `yaml:"retired_for"`
	// ForgetAfter is how long the watchdog keeps facts of what has ended.
	ForgetAfter time.Duration `yaml:"forget_after"`
	// HostRecordFresh is how long a diagnostic record that a person brings for a host explains anything, after it was
	// seen.
	HostRecordFresh time.Duration `yaml:"host_record_fresh"`
	// AddressesFresh is how long the verdict lasts that the addresses of a host have changed: the new ones are recorded at
	// once.
	AddressesFresh time.Duration `yaml:"addresses_fresh"`
	// RejectedFresh is how long after its last rejection by the ingress a client that claims to be a node counts as that
	// node's. Nodeapi reports rejections that go on once a minute.
	RejectedFresh time.Duration `yaml:"rejected_fresh"`
	// RefusedFresh is how long it counts that an attempt to enrol had no recovery token that is good; zero: until the node
	// has another certificate or a session.
	RefusedFresh time.Duration `yaml:"refused_fresh"`
	// OutageAfter is how long after the last beat of any replica of nodeapi its absence is an outage of the control plane.
	// It is not less than what a replica may be silent.
	OutageAfter time.Duration `yaml:"outage_after"`
	// OptionalTaskTypes are the types of tasks, as `storage.allocate`, that agents may lack without being outdated: those
	// that are asked of no node.
	OptionalTaskTypes []string `yaml:"optional_task_types"`
	// PreflightConfirm is how long after a check of the preflight that finds another state the next one is made, which
	// confirms it; so often a rotation of issuers goes on, too.
	PreflightConfirm time.Duration `yaml:"preflight_confirm"`
	// DatabaseVolume is a directory on the volume of the database, where this process sees it; may be empty.
	DatabaseVolume string `yaml:"database_volume"`
}

// Default returns the defaults.
func Default() Config {
	return Config{
		Config: service.Default(), EnrollListen: "127.0.0.1:0", Profile: Profile{Name: "default"},
		EnrollPerSecond: 200, EnrollBurst: 400, EnrollPerTokenSecond: 2, EnrollPerTokenBurst: 20,
		ClaimLease: 10 * time.Second, MintWait: 30 * time.Second, SweepEvery: time.Minute, LaunchSecretLife: 24 * time.Hour,
		RetiredFor: 49 * time.Hour, ForgetAfter: 24 * time.Hour, HostRecordFresh: 24 * time.Hour,
		AddressesFresh: collect.AddressesFresh, RejectedFresh: collect.RejectedFresh, PreflightConfirm: time.Second,
		OutageAfter: replicas.SilentAfter,
	}
}

// Validate reports everything that is wrong with this part; the shared part reports for itself.
func (c Config) Validate() error {
	var errs []error
	for _, need := range []struct{ key, value string }{
		{"join_state_keys", c.JoinStateKeys},
		{"profile.name", c.Profile.Name},
		{"profile.api_url", c.Profile.APIURL},
		{"profile.recovery_url", c.Profile.RecoveryURL},
		{"profile.ca_file", c.Profile.CAFile},
		{"task_signing_pubkeys_file", c.TaskSigningPubkeysFile},
		{"assertion_pubkeys_file", c.AssertionPubkeysFile},
		{"peers.lifecycle", c.Peers.Lifecycle},
	} {
		if need.value == "" {
			errs = append(errs, fmt.Errorf("%s is needed", need.key))
		}
	}
	errs = append(errs, c.validateAuthority())
	if c.Profile.APIURL != "" {
		if _, err := config.HostPort(c.Profile.APIURL); err != nil {
			errs = append(errs, fmt.Errorf("profile.api_url: %w", err))
		}
	}
	if c.Profile.RecoveryURL != "" {
		if u, err := url.Parse(c.Profile.RecoveryURL); err != nil || u.Scheme != "https" || u.Host == "" {
			errs = append(errs, errors.New("profile.recovery_url is not an https URL"))
		}
	}
	for _, limit := range []struct {
		key   string
		value float64
	}{
		{"enroll_per_second", c.EnrollPerSecond},
		{"enroll_burst", float64(c.EnrollBurst)},
		{"enroll_per_token_second", c.EnrollPerTokenSecond},
		{"enroll_per_token_burst", float64(c.EnrollPerTokenBurst)},
		{"claim_lease", c.ClaimLease.Seconds()},
		{"mint_wait", c.MintWait.Seconds()},
		{"sweep_every", c.SweepEvery.Seconds()},
		{"launch_secret_life", c.LaunchSecretLife.Seconds()},
		{"retired_for", c.RetiredFor.Seconds()},
		{"forget_after", c.ForgetAfter.Seconds()},
		{"host_record_fresh", c.HostRecordFresh.Seconds()},
		{"addresses_fresh", c.AddressesFresh.Seconds()},
		{"rejected_fresh", c.RejectedFresh.Seconds()},
		{"preflight_confirm", c.PreflightConfirm.Seconds()},
	} {
		if limit.value <= 0 {
			errs = append(errs, fmt.Errorf("%s is not above zero", limit.key))
		}
	}
	if c.RefusedFresh < 0 {
		errs = append(errs, errors.New("refused_fresh is below zero"))
	}
	if c.OutageAfter < replicas.SilentAfter {
		errs = append(errs, fmt.Errorf("outage_after is below %s, for which a replica of nodeapi may be silent",
			replicas.SilentAfter))
	}
	_, err := c.optionalTypes()
	return errors.Join(append(errs, err)...)
}

// optionalTypes returns the types of tasks that agents may lack.
func (c Config) optionalTypes() ([]commonv1.TaskType, error) {
	var out []commonv1.TaskType
	for _, name := range c.OptionalTaskTypes {
		t, err := names.Parse[commonv1.TaskType](name)
		if err != nil {
			return nil, fmt.Errorf("optional_task_types: %w", err)
		}
		out = append(out, t)
	}
	return out, nil
}

// validateAuthority reports what is wrong with the choice of the node authority.
func (c Config) validateAuthority() error {
	process := c.CAProcess
	switch {
	case process == (CAProcess{}) && c.CADir == "":
		return errors.New("ca_dir is needed, or ca_process.url for an authority that runs as a process of its own")
	case process == (CAProcess{}):
		return nil
	case c.CADir != "":
		return errors.New("ca_dir and ca_process name two node authorities; remove one")
	}
	var errs []error
	if u, err := url.Parse(process.URL); err != nil || u.Scheme != "https" || u.Host == "" {
		errs = append(errs, errors.New("ca_process.url is not an https URL"))
	}
	if process.RootsFile == "" {
		errs = append(errs, errors.New("ca_process.roots_file is needed"))
	}
	if process.KeyFile == "" {
		errs = append(errs, errors.New("ca_process.key_file is needed"))
	}
	if c.CADatabaseURLFile != "" {
		errs = append(errs,
			errors.New("ca_database_url_file is of the embedded authority; ca_process keeps its own database"))
	}
	return errors.Join(errs...)
}
