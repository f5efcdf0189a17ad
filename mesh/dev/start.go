package dev

import (
	"context"
	"fmt"
	"log/slog"
	"path/filepath"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/mesh/agents"
)

// start waits for the services, lets the agents begin, waits for them, and prints the addresses. Then it makes the
// demo.
func (m *Mesh) start(ctx context.Context, began chan<- struct{}) error {
	if err := m.awaitServices(ctx); err != nil {
		return err
	}
	m.mark(ctx, "services ready")
	absent, err := agents.Enrol(ctx, m.person, m.agents)
	if err != nil {
		return err
	}
	close(began)
	awaited := agents.Without(m.agents, absent)
	connected, err := agents.Await(ctx, m.person, awaited, time.Minute)
	if err != nil {
		return err
	}
	if connected < len(awaited) {
		// The mesh works; the log of an agent has the reason.
		m.deps.Logger.WarnContext(ctx, "not all agents are connected", slog.Int("connected", connected),
			slog.Int("agents", len(awaited)))
	}
	if err := m.admitPeople(ctx); err != nil {
		return err
	}
	if err := m.announce(ctx); err != nil {
		return err
	}
	m.took = time.Since(m.deps.Began)
	m.printSummary(connected, absent)
	close(m.ready)
	if m.cfg.NoDemo {
		return nil
	}
	if err := m.demo(ctx); err != nil && ctx.Err() == nil {
		m.deps.Logger.WarnContext(ctx, "demo workspace was not made", obs.Err(err))
		fmt.Fprintf(m.deps.Out, "Demo:      %s/%s was not made: %v\n", demoTenant, demoWorkspace, err)
	}
	return nil
}

func (m *Mesh) mark(ctx context.Context, what string) {
	m.deps.Logger.InfoContext(ctx, "start reached a point", slog.String("point", what),
		slog.Duration("since_begin", time.Since(m.deps.Began)))
}

func (m *Mesh) announce(ctx context.Context) error {
	if m.deps.Announce == nil {
		return nil
	}
	roots, err := pki.ReadFile(m.material.ServiceRoots())
	if err != nil {
		return err
	}
	m.context, err = m.deps.Announce(ctx, Announcement{
		Server: m.cfg.ConsoleAddr, TrustDomain: TrustDomain, CAPEM: string(roots), Token: m.token, People: m.people,
		Dir: m.dir, Ephemeral: m.cfg.Ephemeral,
	})
	if err != nil {
		return fmt.Errorf("tell the client where this mesh is: %w", err)
	}
	return nil
}

// printSummary prints what a person needs next: addresses and commands.
func (m *Mesh) printSummary(connected int, absent []agents.Absent) {
	out := m.deps.Out
	fate := "delete it to begin anew"
	if m.cfg.Ephemeral {
		fate = "removed at the end"
	}
	fmt.Fprintf(out, "gpuaas dev %s   (data: %s, %s)\n", m.deps.Version, m.dir, fate)
	reached := ""
	if m.context != "" {
		reached = "   context: " + m.context
	}
	fmt.Fprintf(out, "API:       https://%s   user: %s%s\n", m.cfg.ConsoleAddr, Subject, reached)
	fmt.Fprintln(out, "Console:   not built")
	fmt.Fprintf(out, "Node API:  %s mTLS   Enrolment: https://%s\n", m.cfg.NodeAddr, m.cfg.EnrollAddr)
	fmt.Fprintf(out, "Metrics:   http://%s/metrics\n", m.cfg.MetricsAddr)
	fmt.Fprintf(out, "Stores:    Postgres %s, fsync=%s   Redis: %s\n", m.stores.Facts.PostgresVersion,
		m.stores.Facts.Fsync, m.stores.RedisKind())
	fmt.Fprintf(out, "Log:       %s\n", filepath.Join(m.dir, LogFile))
	fmt.Fprintf(out, "Nodes:     %d of %d agents connected\n", connected, len(m.agents))
	for _, a := range absent {
		fmt.Fprintf(out, "           %s %s: %s\n", a.Name, a.Why, a.Next)
	}
	fmt.Fprintf(out, "Try:       gpuaas status · gpuaas nodes list · gpuaas nodes probe n1\n")
	fmt.Fprintf(out, "           gpuaas workspaces create demo2 --tenant %s --wait\n", demoTenant)
	m.printPeople()
	fmt.Fprintf(m.deps.Err, "ready in %.1f s\n", m.took.Seconds())
}

const (
	demoTenant    = "acme"
	demoWorkspace = "demo"
)

// demo makes a tenant and a workspace as an example for a newcomer.
func (m *Mesh) demo(ctx context.Context) error {
	began := time.Now()
	if _, err := m.demoTenantID(ctx); err != nil {
		return err
	}
	name := demoTenant + "/" + demoWorkspace
	existed := true
	pos := ""
	if _, err := m.person.Query.GetWorkspace(ctx, &readmodelv1.GetWorkspaceRequest{Workspace: name}); err != nil {
		if !fault.Has(err, commonv1.Reason_REASON_NOT_FOUND) {
			return fmt.Errorf("look for workspace %s: %w", name, err)
		}
		existed = false
		resp, err := m.person.Command.CreateWorkspace(ctx,
			&readmodelv1.CreateWorkspaceRequest{Tenant: demoTenant, Name: demoWorkspace})
		if err != nil {
			return fmt.Errorf("create workspace %s: %w", name, err)
		}
		pos = resp.GetOperation().GetPos()
	}
	ws, err := m.awaitWorkspace(ctx, name, pos, existed)
	if err != nil {
		return err
	}
	how := "created in " + fmt.Sprintf("%.1f s", time.Since(began).Seconds())
	if existed {
		how = "as it was"
	}
	fmt.Fprintf(m.deps.Out, "Demo:      %s → %s (%s)", name, names.Of(ws.GetState()), how)
	for _, e := range ws.GetEndpoints() {
		fmt.Fprintf(m.deps.Out, "   %s", e.GetUrl())
	}
	fmt.Fprintln(m.deps.Out)
	return nil
}

// awaitWorkspace waits for the end of the workspace's provisioning; one that existed is read once.
func (m *Mesh) awaitWorkspace(ctx context.Context, name, pos string, existed bool) (*readmodelv1.Workspace, error) {
	const limit = 2 * time.Minute
	deadline := time.Now().Add(limit)
	for {
		resp, err := m.person.Query.GetWorkspace(ctx, &readmodelv1.GetWorkspaceRequest{Workspace: name, MinPos: pos})
		if err == nil {
			ws := resp.GetWorkspace()
			if existed || ws.GetState() != commonv1.WorkspaceState_WORKSPACE_STATE_PROVISIONING {
				return ws, nil
			}
			err = fmt.Errorf("workspace %s still is %s", name, names.Of(ws.GetState()))
		}
		if time.Now().After(deadline) {
			return nil, err
		}
		if !app.Sleep(ctx, 50*time.Millisecond) {
			return nil, context.Cause(ctx)
		}
	}
}
