package dev

import (
	"context"
	"log/slog"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/config"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/ports"
	"github.com/gpuaas/mesh/mesh/agents"
	"github.com/gpuaas/mesh/mesh/person"
	"github.com/gpuaas/mesh/mesh/topology"
	"github.com/gpuaas/mesh/services/recovery/policyadmin"
)

// applyPolicy stores the values of the policy file, which was validated as a whole, before any service reads them. In
// rollback mode the mesh starts with the values that are stored, since a person can accept the rollback only in a mesh
// that runs.
func (m *Mesh) applyPolicy(ctx context.Context) error {
	if len(m.cfg.policy) == 0 {
		return nil
	}
	url, err := config.SecretFile(m.material.URLFile(pg.RoleRecovery)).Read()
	if err != nil {
		return err
	}
	pool, err := pg.Open(ctx, pg.Config{URL: url.Reveal(), ApplicationName: "gpuaas-dev-policy", MaxConns: 1})
	if err != nil {
		return err
	}
	defer pool.Close()
	err = policyadmin.Apply(ctx, pool, m.cfg.policy, Subject, "policy file of gpuaas dev")
	if fault.Has(err, commonv1.Reason_REASON_CONTROL_PLANE_ROLLBACK) {
		m.deps.Logger.WarnContext(ctx, "the policy file is not applied: rollback mode is active",
			slog.String("file", m.cfg.PolicyFile),
			slog.String("next_action", "`gpuaas rollback accept --reason TEXT`, then start again"))
		return nil
	}
	return err
}

// admit makes the person's session and the client that this mesh uses itself.
func (m *Mesh) admit(ctx context.Context) error {
	var err error
	m.token, m.person, err = person.Operator(ctx, m.material, TrustDomain, Subject, m.cfg.ConsoleAddr)
	return err
}

// furnish makes the agents' directories, ends those that an earlier mesh left, and points all of them and the instances
// at the addresses of this one.
func (m *Mesh) furnish(ctx context.Context) error {
	if n, err := agents.EndLeftovers(ctx, m.agentsDir(), agentsGrace); err != nil {
		return err
	} else if n > 0 {
		m.deps.Logger.WarnContext(ctx, "ended agents that an earlier mesh left", slog.Int("agents", n))
	}
	var err error
	m.agents, err = agents.Several(m.deps.Logger, m.cfg.Nodes, m.agentsDir(), agents.Config{
		Binary: m.cfg.agent, GPUs: simulatedGPUs,
		TrustDomain: TrustDomain, APIURL: m.cfg.NodeAddr, EnrollURL: "https://" + m.cfg.EnrollAddr,
		CAFile: m.material.ServiceRoots(),
	})
	if err != nil {
		return err
	}
	return agents.PointInstances(ctx, m.instanceDir(), m.cfg.NodeAddr, "https://"+m.cfg.EnrollAddr)
}

// simulatedGPUs is how many GPUs each agent of dev declares, so that workspaces with GPUs can be tried anywhere.
const simulatedGPUs = 4

// makePlan decides by which addresses and paths the parts find each other.
func (m *Mesh) makePlan(ctx context.Context) error {
	internal, err := ports.Free(ctx, 2)
	if err != nil {
		return err
	}
	m.plan = topology.Plan{
		Material: m.material, TrustDomain: TrustDomain, AgentBinary: m.cfg.agent, InstanceDir: m.instanceDir(),
		Redis: m.stores.RedisKind() != "none", Placement: "process", Profile: "dev", Reflection: true, Drain: 2 * time.Second,
		RetentionSweep: m.cfg.RetentionSweep,
		KeepEnded:      m.cfg.KeepEnded,
		ForgetAfter:    m.cfg.ForgetAfter,
		SeededDatabase: m.cfg.SeededDatabase,
		Addresses: topology.Addresses{
			Recovery: internal[0], Lifecycle: internal[1], Console: m.cfg.ConsoleAddr, Enroll: m.cfg.EnrollAddr,
			Agents: m.cfg.NodeAddr,
		},
	}
	if m.cfg.DatabaseURL == "" {
		m.plan.DatabaseVolume = m.dir
	}
	return nil
}
