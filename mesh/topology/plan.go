package topology

import (
	"cmp"
	"fmt"
	"path/filepath"
	"time"

	"github.com/gpuaas/mesh/internal/config"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/service"
	"github.com/gpuaas/mesh/mesh/material"
	"github.com/gpuaas/mesh/services/lifecycle"
	"github.com/gpuaas/mesh/services/lifecycle/placement/process"
	"github.com/gpuaas/mesh/services/nodeapi"
	"github.com/gpuaas/mesh/services/readmodel"
	"github.com/gpuaas/mesh/services/recovery"
)

// Addresses are where the services listen and find each other, as host:port.
type Addresses struct {
	Recovery, Lifecycle string // internal ports
	Console             string // for people
	Enroll              string // for machines without an identity
	Agents              string // for machines with one; it may be a balancer before replicas of nodeapi
}

// Plan is one mesh on one machine.
type Plan struct {
	Material       *material.Material
	TrustDomain    string
	Addresses      Addresses
	AgentBinary    string
	InstanceDir    string // where the process driver keeps its instances
	Redis          bool   // whether there is a lock store
	Placement      string // of workspaces that do not name one
	Reflection     bool   // gRPC reflection on the people's port
	Profile        string // the name of the profile that agents get
	Log            obs.LogConfig
	Drain          time.Duration // in which agents go to another replica; within a quarter of it they are told to
	DatabaseVolume string        // a directory on the volume of the database, where recovery sees it; may be empty
	// RetentionSweep is how often history is cut; zero: the default of the services.
	RetentionSweep time.Duration
	// KeepEnded is how long the files of an ended instance stay on its host, and its line in the launch log; zero: the
	// default of lifecycle.
	KeepEnded time.Duration
	// ForgetAfter is how long recovery and nodeapi keep what has ended in working tables and memory, and for how long the
	// secret of a launched instance is good; zero: as the services do by default.
	ForgetAfter time.Duration
	// SeededDatabase allows a database whose fleet was loaded by a bench.
	SeededDatabase bool
}

// shared returns the part of a configuration that all services have.
func (p Plan) shared(name, listen, ops string) service.Config {
	c := service.Default()
	c.Service, c.Log, c.TrustDomain = name, p.Log, p.TrustDomain
	c.DatabaseURLFile = config.SecretFile(p.Material.URLFile(name))
	c.SequencerURLFile = config.SecretFile(p.Material.URLFile(pg.RoleSequencer))
	c.TLS = service.TLS{
		CertFile: p.Material.Identity(name), KeyFile: p.Material.Identity(name),
		CAFile: p.Material.Trust(name),
	}
	c.Listen, c.OpsListen, c.SeededDatabase = listen, ops, p.SeededDatabase
	c.RetentionSweep = cmp.Or(p.RetentionSweep, c.RetentionSweep)
	return c
}

// NodeAPI returns the configuration of a replica that listens for agents at the given address.
func (p Plan) NodeAPI(agents, ops string) nodeapi.Config {
	c := nodeapi.Default()
	c.Config = p.shared(material.NodeAPI, c.Listen, ops)
	c.AgentListen, c.NodeCAFile, c.JoinStatePubkeysFile = agents, p.Material.NodeRoots(), p.Material.JoinStatePubkeys()
	c.Peers = nodeapi.Peers{Recovery: p.Addresses.Recovery, Lifecycle: p.Addresses.Lifecycle}
	c.ForgetAfter, c.RetiredFor = cmp.Or(p.ForgetAfter, c.ForgetAfter), cmp.Or(p.ForgetAfter, c.RetiredFor)
	if p.Drain > 0 {
		c.DrainSpread, c.DrainTimeout = p.Drain/4, p.Drain
	}
	return c
}

// Recovery returns the configuration of recovery.
func (p Plan) Recovery(ops string) recovery.Config {
	c := recovery.Default()
	c.Config = p.shared(material.Recovery, p.Addresses.Recovery, ops)
	c.DatabaseVolume = p.DatabaseVolume
	c.ForgetAfter, c.RetiredFor = cmp.Or(p.ForgetAfter, c.ForgetAfter), cmp.Or(p.ForgetAfter, c.RetiredFor)
	c.LaunchSecretLife = cmp.Or(p.ForgetAfter, c.LaunchSecretLife)
	c.EnrollListen, c.CADir, c.JoinStateKeys = p.Addresses.Enroll, p.Material.NodeCADir(), p.Material.JoinStateKeyDir()
	c.Profile = recovery.Profile{
		Name: p.Profile, APIURL: p.Addresses.Agents, RecoveryURL: "https://" + p.Addresses.Enroll,
		CAFile: p.Material.ServiceRoots(),
	}
	c.TaskSigningPubkeysFile, c.AssertionPubkeysFile = p.Material.TaskPubkeys(), p.Material.AssertionPubkeys()
	c.Peers = recovery.Peers{Lifecycle: p.Addresses.Lifecycle}
	return c
}

// Lifecycle returns the configuration of lifecycle.
func (p Plan) Lifecycle(ops string) lifecycle.Config {
	c := lifecycle.Default()
	c.Config = p.shared(material.Lifecycle, p.Addresses.Lifecycle, ops)
	c.TaskSigningKeyFile, c.JoinStatePubkeysFile, c.AssertionPubkeysFile = p.Material.TaskKey(),
		p.Material.JoinStatePubkeys(), p.Material.AssertionPubkeys()
	c.TaskSigningPubkeysFile = p.Material.TaskPubkeys()
	c.SecretFile = config.SecretFile(p.Material.LifecycleSecret())
	c.WorkloadSecretsKeysFile = config.SecretFile(p.Material.WorkloadSecretKeys())
	c.WorkloadDatabaseURL = config.SecretFile(p.Material.URLFile(pg.RoleWorkloadAdmin))
	if p.Redis {
		c.RedisURLFile = config.SecretFile(p.Material.RedisURLFile())
	}
	if p.Placement != "" {
		c.DefaultPlacement = p.Placement
	}
	c.Placement.Process = p.Instances()
	c.Peers = lifecycle.Peers{Recovery: p.Addresses.Recovery}
	return c
}

// Readmodel returns the configuration of readmodel; hosts are the names by which people may call it.
func (p Plan) Readmodel(ops string, hosts []string) readmodel.Config {
	c := readmodel.Default()
	c.Config = p.shared(material.Readmodel, c.Listen, ops)
	c.PeopleListen, c.PeopleHosts, c.AssertionKeyFile = p.Addresses.Console, hosts, p.Material.AssertionKey()
	c.Reflection = p.Reflection
	c.Peers = readmodel.Peers{Recovery: p.Addresses.Recovery, Lifecycle: p.Addresses.Lifecycle}
	return c
}

// Instances returns the configuration of the driver that launches instances as processes.
func (p Plan) Instances() process.Config {
	c := lifecycle.Default().Placement.Process
	c.Dir, c.AgentBinary, c.CAFile = p.InstanceDir, p.AgentBinary, p.Material.ServiceRoots()
	c.KeepEnded, c.RememberEnded = p.KeepEnded, p.KeepEnded
	c.APIURL, c.EnrollURL = p.Addresses.Agents, "https://"+p.Addresses.Enroll
	return c
}

// Write renders a configuration to the file of a process and returns its path.
func Write[C any](m *material.Material, name string, cfg C) (string, error) {
	data, err := config.Marshal(cfg)
	if err != nil {
		return "", fmt.Errorf("render configuration of %s: %w", name, err)
	}
	path := m.ConfigFile(name)
	if err := material.Keep(path, string(data)); err != nil {
		return "", fmt.Errorf("render configuration of %s: %w", filepath.Base(path), err)
	}
	return path, nil
}
