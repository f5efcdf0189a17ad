package dev

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/service"
	"github.com/gpuaas/mesh/mesh/material"
	"github.com/gpuaas/mesh/mesh/topology"
	"github.com/gpuaas/mesh/services/lifecycle"
	"github.com/gpuaas/mesh/services/nodeapi"
	"github.com/gpuaas/mesh/services/readmodel"
	"github.com/gpuaas/mesh/services/recovery"
)

// running is a service with its name.
type running struct {
	topology.Running

	name  string
	close func() // releases what the constructor opened, if Run is never called
}

// buildServices builds all services by their own constructors. They share nothing with each other but addresses.
func (m *Mesh) buildServices(ctx context.Context) error {
	if err := m.makePlan(ctx); err != nil {
		return err
	}
	var err error
	if m.registry, err = obs.NewRegistry(); err != nil {
		return err
	}
	const anyPort = "127.0.0.1:0"
	recoveryCfg := m.plan.Recovery(anyPort)
	if m.numbering, err = service.NewNumbering(ctx, m.deps.Logger, "dev", recoveryCfg.SequencerURLFile); err != nil {
		return err
	}
	r, err := recovery.New(ctx, recovery.Deps{
		Logger: m.deps.Logger, Registry: m.registry, Numbering: m.numbering,
	}, recoveryCfg)
	if err != nil {
		return err
	}
	m.services = append(m.services, running{Running: r, name: material.Recovery, close: r.Close})
	if m.instances, err = lifecycle.New(ctx, lifecycle.Deps{
		Logger: m.deps.Logger, Registry: m.registry, Numbering: m.numbering,
	}, m.plan.Lifecycle(anyPort)); err != nil {
		return err
	}
	m.services = append(m.services, running{Running: m.instances, name: material.Lifecycle})
	n, err := nodeapi.New(ctx, nodeapi.Deps{
		Logger: m.deps.Logger, Registry: m.registry, Numbering: m.numbering,
	}, m.plan.NodeAPI(m.cfg.NodeAddr, anyPort))
	if err != nil {
		return err
	}
	m.services = append(m.services, running{Running: n, name: material.NodeAPI})
	v, err := readmodel.New(ctx, readmodel.Deps{
		Logger: m.deps.Logger, Registry: m.registry, Numbering: m.numbering,
	}, m.plan.Readmodel(anyPort, m.cfg.hosts()))
	if err != nil {
		return err
	}
	m.services = append(m.services, running{Running: v, name: material.Readmodel})
	return m.buildOps(ctx)
}

// buildOps makes the one port that serves the metrics of all services, and whether each is ready.
func (m *Mesh) buildOps(ctx context.Context) error {
	health := obs.NewHealth()
	for _, s := range m.services {
		health.Ready(s.name, func(ctx context.Context) error { return askReady(ctx, s.OpsAddr()) })
	}
	var err error
	m.ops, err = obs.NewOpsServer(ctx, obs.OpsDeps{Logger: m.deps.Logger, Registry: m.registry, Health: health},
		m.cfg.MetricsAddr)
	return err
}

// askReady asks a service for its readiness as an orchestrator does.
func askReady(ctx context.Context, addr string) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	return topology.AskReady(ctx, topology.OneRequest(), addr)
}

// awaitServices waits until every service reports itself as ready.
func (m *Mesh) awaitServices(ctx context.Context) error {
	const limit = time.Minute
	deadline := time.Now().Add(limit)
	for _, s := range m.services {
		for {
			err := askReady(ctx, s.OpsAddr())
			if err == nil {
				break
			}
			if time.Now().After(deadline) {
				return fmt.Errorf("%s is not ready after %s: %w", s.name, limit, err)
			}
			if !app.Sleep(ctx, 25*time.Millisecond) {
				return errors.Join(context.Cause(ctx), err)
			}
		}
	}
	return nil
}
