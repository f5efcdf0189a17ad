// Package cluster is a mesh of separate processes on one machine: each service as `gpuaas <service> --config FILE` in
// several replicas, TCP balancers before them, agents, Postgres and Redis, each of which can be killed and started by
// itself.
//
// It owns a directory and child processes. It takes a process for ready when the process's own /readyz does. It uses
// the services through their binaries and the public API only. Guarantees: every process that it started ends with it;
// a process that ends by itself while Keep runs is started again.
package cluster

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/config"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/ports"
	"github.com/gpuaas/mesh/mesh/agents"
	"github.com/gpuaas/mesh/mesh/material"
	"github.com/gpuaas/mesh/mesh/person"
	"github.com/gpuaas/mesh/mesh/stores"
	"github.com/gpuaas/mesh/mesh/topology"
	"github.com/gpuaas/mesh/services/lifecycle/placement/process"
	"github.com/gpuaas/mesh/services/recovery/policyadmin"
)

const (
	// TrustDomain of a cluster.
	TrustDomain = "mesh.local"
	// Subject is the person of a cluster.
	Subject = "cluster"
)

// Config describes what to run.
type Config struct {
	Dir      string // absolute; servers and workloads run as other users and must be able to traverse it
	Programs string // directory of gpuaas and gpuaas-node-agent
	Replicas int    // of each service
	Nodes    int
	GPUs     int      // simulated, on each node
	Env      []string // of all processes and agents
	CacheDir string   // searched for Postgres' binaries after the system's
	Policy   map[string]string
	LogLevel string
	// Statements has our Postgres count what each statement costs, if it can.
	Statements bool
	// Addresses for people, agents and enrolment; empty: free ports.
	Console, Agents, Enroll string
}

// Cluster is a cluster that has been prepared.
type Cluster struct {
	cfg      Config
	logger   *slog.Logger
	Plan     topology.Plan
	Material *material.Material
	Stores   *stores.Stores
	Client   *person.Client // an operator

	Recovery, Lifecycle, Readmodel, NodeAPI []*Process // the replicas
	Nodes                                   []*agents.Agent

	token     string
	balancers []*balancer
	health    []*readiness // of the replicas behind balancers
}

// FewConnections returns the environment of services that serve a handful of nodes: pools of the default size fill when
// all loops of a process begin at once, and each connection plans every statement for itself.
func FewConnections() []string {
	const conns = "6"
	var out []string
	for _, service := range []string{"RECOVERY", "LIFECYCLE", "READMODEL", "NODEAPI"} {
		out = append(out, "GPUAAS_"+service+"_DATABASE_CONNS="+conns)
	}
	return out
}

// New makes the directory, starts the stores and renders the configurations. No service runs before Start.
func New(ctx context.Context, logger *slog.Logger, cfg Config) (*Cluster, error) {
	if cfg.Replicas < 1 {
		cfg.Replicas = 1
	}
	c := &Cluster{cfg: cfg, logger: logger}
	for _, step := range []func(context.Context) error{c.prepare, c.address, c.setPolicy, c.admit, c.render, c.furnish} {
		if err := step(ctx); err != nil {
			return nil, errors.Join(err, c.Close(context.WithoutCancel(ctx)))
		}
	}
	return c, nil
}

func (c *Cluster) agentsDir() string { return filepath.Join(c.cfg.Dir, "agents") }
func (c *Cluster) logDir() string    { return filepath.Join(c.cfg.Dir, "log") }

func (c *Cluster) prepare(ctx context.Context) error {
	for _, dir := range []string{c.cfg.Dir, c.agentsDir(), filepath.Join(c.cfg.Dir, "placement"), c.logDir()} {
		if err := os.MkdirAll(dir, 0o711); err != nil {
			return fmt.Errorf("make directory: %w", err)
		}
	}
	var err error
	if c.Material, err = material.Make(material.Config{
		Dir:         filepath.Join(c.cfg.Dir, "material"),
		TrustDomain: TrustDomain,
	}); err != nil {
		return err
	}
	c.Stores, err = stores.Start(ctx, c.logger, c.Material, stores.Config{
		Dir: filepath.Join(c.cfg.Dir, "postgres"), RedisDir: filepath.Join(c.cfg.Dir, "redis"),
		CacheDir: c.cfg.CacheDir, Statements: c.cfg.Statements,
	})
	return err
}

func (c *Cluster) address(ctx context.Context) error {
	free, err := ports.Free(ctx, 5)
	if err != nil {
		return err
	}
	for i, addr := range []*string{&c.cfg.Console, &c.cfg.Agents, &c.cfg.Enroll} {
		if *addr == "" {
			*addr = free[i]
		}
	}
	c.Plan = topology.Plan{
		Material: c.Material, TrustDomain: TrustDomain, AgentBinary: filepath.Join(c.cfg.Programs, agents.Program),
		InstanceDir: filepath.Join(c.cfg.Dir, "placement"), Redis: true, Placement: "process", Profile: "cluster",
		Log:   obs.LogConfig{Level: c.cfg.LogLevel},
		Drain: 2 * time.Second,
		Addresses: topology.Addresses{
			Recovery: free[3], Lifecycle: free[4], Console: c.cfg.Console, Enroll: c.cfg.Enroll,
			Agents: c.cfg.Agents,
		},
	}
	return nil
}

// setPolicy stores the policy before any service reads it. In rollback mode the cluster starts with the values that are
// stored, since a person can accept the rollback only in a mesh that runs.
func (c *Cluster) setPolicy(ctx context.Context) error {
	if len(c.cfg.Policy) == 0 {
		return nil
	}
	url, err := config.SecretFile(c.Material.URLFile(pg.RoleRecovery)).Read()
	if err != nil {
		return err
	}
	pool, err := pg.Open(ctx, pg.Config{URL: url.Reveal(), ApplicationName: "gpuaas-cluster-policy", MaxConns: 1})
	if err != nil {
		return err
	}
	defer pool.Close()
	err = policyadmin.Apply(ctx, pool, c.cfg.Policy, Subject, "policy of the cluster")
	if fault.Has(err, commonv1.Reason_REASON_CONTROL_PLANE_ROLLBACK) {
		c.logger.WarnContext(ctx, "the policy of the cluster is not applied: rollback mode is active",
			slog.String("next_action", "`gpuaas rollback accept --reason TEXT`, then start again"))
		return nil
	}
	return err
}

func (c *Cluster) admit(ctx context.Context) error {
	var err error
	c.token, c.Client, err = person.Operator(ctx, c.Material, TrustDomain, Subject, c.Plan.Addresses.Console)
	return err
}

// Token returns the operator's bearer token.
func (c *Cluster) Token() string { return c.token }

func (c *Cluster) furnish(ctx context.Context) error {
	if _, err := agents.EndLeftovers(ctx, c.agentsDir(), 2*time.Second); err != nil {
		return err
	}
	var err error
	c.Nodes, err = agents.Several(c.logger, c.cfg.Nodes, c.agentsDir(), agents.Config{
		Binary: c.Plan.AgentBinary, GPUs: c.cfg.GPUs, Env: c.cfg.Env,
		TrustDomain: TrustDomain, APIURL: c.Plan.Addresses.Agents, EnrollURL: "https://" + c.Plan.Addresses.Enroll,
		CAFile: c.Material.ServiceRoots(),
	})
	if err != nil {
		return err
	}
	return agents.PointInstances(ctx, c.Plan.InstanceDir, c.Plan.Addresses.Agents, "https://"+c.Plan.Addresses.Enroll)
}

// Processes returns those of the services, in the order in which they are started.
func (c *Cluster) Processes() []*Process {
	return slices.Concat(c.Recovery, c.Lifecycle, c.Readmodel, c.NodeAPI)
}

// Start starts all services and waits until they are ready, then enrols and starts the agents and waits until they are
// connected.
func (c *Cluster) Start(ctx context.Context) error {
	for _, p := range c.Processes() {
		if err := p.Start(); err != nil {
			return err
		}
	}
	if err := c.AwaitReady(ctx); err != nil {
		return err
	}
	absent, err := agents.Enrol(ctx, c.Client, c.Nodes)
	if err != nil {
		return err
	}
	for _, a := range absent {
		return fmt.Errorf("node %s %s: %s", a.Name, a.Why, a.Next)
	}
	for _, a := range c.Nodes {
		if err := a.Start(); err != nil {
			return err
		}
	}
	return c.AwaitNodes(ctx)
}

// AwaitReady waits until every service is ready.
func (c *Cluster) AwaitReady(ctx context.Context) error {
	for _, p := range c.Processes() {
		if err := p.AwaitReady(ctx); err != nil {
			return err
		}
	}
	return nil
}

// connectedWithin is many times as long as agents need on a busy machine.
const connectedWithin = 2 * time.Minute

// AwaitNodes waits until every agent is connected, at most connectedWithin.
func (c *Cluster) AwaitNodes(ctx context.Context) error {
	n, err := agents.Await(ctx, c.Client, c.Nodes, connectedWithin)
	if err != nil {
		return err
	}
	if n < len(c.Nodes) {
		return fmt.Errorf("%d of %d agents are connected after %s:\n%s", n, len(c.Nodes), connectedWithin, c.Tails(15))
	}
	return nil
}

// ShutOut refuses, or admits again, new connections to addr, one of the Plan's addresses; established ones go on. It
// returns how many were refused since the first call that shut it.
func (c *Cluster) ShutOut(addr string, shut bool) (int64, error) {
	b, err := c.before(addr)
	if err != nil {
		return 0, err
	}
	b.shut.Store(shut)
	return b.refused.Load(), nil
}

// Divert sends new connections to addr, one of the Plan's addresses, to another address in place of the replicas;
// established ones go on. An empty address ends that.
func (c *Cluster) Divert(addr, to string) error {
	b, err := c.before(addr)
	if err == nil {
		b.diverted.Store(to)
	}
	return err
}

// Replicas returns where the replicas behind addr, one of the Plan's addresses, listen.
func (c *Cluster) Replicas(addr string) ([]string, error) {
	b, err := c.before(addr)
	if err != nil {
		return nil, err
	}
	var out []string
	for _, each := range b.backends {
		out = append(out, each.addr)
	}
	return out, nil
}

// before returns the balancer at addr.
func (c *Cluster) before(addr string) (*balancer, error) {
	for _, b := range c.balancers {
		if b.addr == addr {
			return b, nil
		}
	}
	return nil, fmt.Errorf("nothing stands before %s", addr)
}

// Dir returns the directory of the cluster.
func (c *Cluster) Dir() string { return c.cfg.Dir }

// Keep passes connections on to the replicas, and starts services, agents and stores again that end by themselves. It
// runs until ctx ends, and must run from before Start.
func (c *Cluster) Keep(ctx context.Context) error {
	tasks := []app.Task{{Name: "stores", Run: c.Stores.Keep}}
	for _, b := range c.balancers {
		tasks = append(tasks, app.Task{Name: "balancer " + b.addr, Run: b.run})
	}
	for _, h := range c.health {
		tasks = append(tasks, app.Task{Name: "readiness " + h.ops, Run: h.run})
	}
	for _, p := range c.Processes() {
		tasks = append(tasks, app.Task{Name: p.Name, Run: p.keep})
	}
	for _, a := range c.Nodes {
		tasks = append(tasks, app.Task{Name: "agent " + a.Name(), Run: a.Keep})
	}
	return app.Run(ctx, c.logger, tasks...)
}

// Instances returns a process driver over the cluster's launch log, read independently of lifecycle: the launched and
// the live instances.
func (c *Cluster) Instances() (*process.Driver, error) {
	return process.New(c.logger, c.Plan.Instances())
}

// Close ends all processes that were started, workloads included.
func (c *Cluster) Close(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 90*time.Second)
	defer cancel()
	var errs []error
	for _, a := range c.Nodes {
		errs = append(errs, a.Stop(ctx))
	}
	// The balancers have ended with Keep, so the replicas have no streams to drain and need not wait for each other.
	var stopping sync.WaitGroup
	stops := make([]error, len(c.Processes()))
	for i, p := range c.Processes() {
		stopping.Go(func() { stops[i] = p.Stop(ctx) })
	}
	stopping.Wait()
	errs = append(errs, stops...)
	if c.Plan.InstanceDir != "" {
		driver, err := c.Instances()
		if err == nil {
			err = driver.PowerOff(ctx)
		}
		errs = append(errs, err)
	}
	_, err := agents.End(ctx, c.cfg.Dir, 500*time.Millisecond)
	errs = append(errs, err)
	if c.Client != nil {
		c.Client.Close()
	}
	for _, b := range c.balancers {
		_ = b.listener.Close() // Keep may have closed it
	}
	if c.Stores != nil {
		errs = append(errs, c.Stores.Stop(ctx))
	}
	return errors.Join(errs...)
}
