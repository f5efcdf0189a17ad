package cluster

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"

	"github.com/gpuaas/mesh/internal/ports"
	"github.com/gpuaas/mesh/mesh/material"
	"github.com/gpuaas/mesh/mesh/topology"
)

// render writes the configuration of every process, and puts a balancer before the replicas at each address by which
// clients reach them.
func (c *Cluster) render(ctx context.Context) error {
	for i := range c.cfg.Replicas {
		if err := c.renderReplica(ctx, i+1); err != nil {
			return err
		}
	}
	return nil
}

func (c *Cluster) renderReplica(ctx context.Context, n int) error {
	const services, listeners = 4, 5
	free, err := ports.Free(ctx, services+listeners)
	if err != nil {
		return err
	}
	ops, listen := free[:services], free[services:]
	recovery, lifecycle, readmodel := c.Plan.Recovery(ops[0]), c.Plan.Lifecycle(ops[1]), c.Plan.Readmodel(ops[2], nil)
	recovery.Listen, recovery.EnrollListen, lifecycle.Listen, readmodel.PeopleListen = listen[0], listen[1], listen[2],
		listen[3]
	health := make([]*readiness, services)
	for i := range health {
		health[i] = newReadiness(ops[i])
	}
	c.health = append(c.health, health...)
	for i, way := range []struct {
		addr  string
		ready *readiness
	}{
		{c.Plan.Addresses.Recovery, health[0]},
		{c.Plan.Addresses.Enroll, health[0]},
		{c.Plan.Addresses.Lifecycle, health[1]},
		{c.Plan.Addresses.Console, health[2]},
		{c.Plan.Addresses.Agents, health[3]},
	} {
		if err := c.balance(ctx, way.addr, backend{addr: listen[i], ready: way.ready}); err != nil {
			return err
		}
	}
	return errors.Join(
		add(c, &c.Recovery, material.Recovery, n, ops[0], recovery),
		add(c, &c.Lifecycle, material.Lifecycle, n, ops[1], lifecycle),
		add(c, &c.Readmodel, material.Readmodel, n, ops[2], readmodel),
		add(c, &c.NodeAPI, material.NodeAPI, n, ops[3], c.Plan.NodeAPI(listen[4], ops[3])),
	)
}

// balance adds backend to those of the balancer at addr.
func (c *Cluster) balance(ctx context.Context, addr string, to backend) error {
	for _, b := range c.balancers {
		if b.addr == addr {
			b.backends = append(b.backends, to)
			return nil
		}
	}
	b, err := newBalancer(ctx, addr, to)
	if err != nil {
		return err
	}
	c.balancers = append(c.balancers, b)
	return nil
}

// add makes the n-th replica of a service.
func add[C any](c *Cluster, to *[]*Process, service string, n int, ops string, cfg C) error {
	name := fmt.Sprintf("%s-%d", service, n)
	file, err := topology.Write(c.Material, name, cfg)
	if err != nil {
		return err
	}
	*to = append(*to, &Process{
		Name: name, Service: service, Ops: ops, binary: filepath.Join(c.cfg.Programs, "gpuaas"), config: file,
		log: filepath.Join(c.logDir(), name+".log"), env: c.cfg.Env, logger: c.logger, changed: make(chan struct{}, 1),
	})
	return nil
}
