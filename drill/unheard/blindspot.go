package unheard

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/gpuaas/mesh/drill/kit"
	"github.com/gpuaas/mesh/drill/kit/act"
	"github.com/gpuaas/mesh/drill/kit/edge"
	"github.com/gpuaas/mesh/drill/kit/host"
	"github.com/gpuaas/mesh/drill/kit/stage"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/mesh/cluster"
	"github.com/gpuaas/mesh/mesh/material"
)

// BlindSpot is row 10: something before the node API and before enrolment ends TLS with certificates of its own, so
// that an agent reaches no API to which it could say so.
func BlindSpot() kit.Drill {
	return kit.Drill{
		Name: "pre-auth-blind-spot",
		Injects: "the ports of the node API and of enrolment are led to a proxy that ends TLS with certificates of another " +
			"issuer, and the agent of a machine that serves a workspace is killed; it is started again and trusts neither",
		Sees: "by the API alone `agent_down`, which names the host's record as missing; once the record that the agent " +
			"keeps on its host is brought with " +
			"`gpuaas nodes diag NODE --file`, `server_tls_untrusted`, with the host's evidence; the workload serves",
		Recovers: "the proxy is taken away: the agent opens a session by itself with the certificate that it had",
		Needs:    "its own mesh: it stands before its ports, and reads the record on a machine",
		Expect: kit.Verdict{
			Reason: "server_tls_untrusted", UserState: "recovering", Owner: "profile", Next: "bundle",
		},
		Mutation: staleRecord,
		FailsAt:  stage.Detected,
		Mutate:   ignoreRecords,
		Run:      runBlindSpot,
	}
}

func runBlindSpot(ctx context.Context, r *kit.Run) error {
	u, err := prepareUnheard(ctx, r)
	if err != nil {
		return err
	}
	defer r.Leave(ctx, u.held.ID)
	away, back, err := intercepted(ctx, u.c)
	defer back()
	if err != nil {
		return stage.At(stage.Good, err)
	}
	at := u.c.Plan.Addresses
	err = r.Inject(ctx, fmt.Sprintf("the agent of %s, process %d, killed, and another issuer's certificates before %s "+
		"and %s",
		u.held.Machine.Name(), u.pid, at.Agents, at.Enroll),
		func(context.Context) error { return errors.Join(away(), u.held.Machine.Kill9()) },
		func(ctx context.Context) error {
			roots := u.c.Material.ServiceRoots()
			return errors.Join(untrustedBy(ctx, at.Agents, roots), untrustedBy(ctx, at.Enroll, roots),
				host.Gone(u.pid, u.agent))
		})
	if err != nil {
		return err
	}
	if err := u.alone(ctx); err != nil {
		return err
	}
	if err := u.missing(ctx, true); err != nil {
		return stage.At(stage.Detected, err)
	}
	if err := u.bring(ctx, commonv1.DiagnosticCode_DIAGNOSTIC_CODE_SERVER_TLS_UNTRUSTED); err != nil {
		return err
	}
	if err := u.detect(ctx); err != nil {
		return err
	}
	if err := u.missing(ctx, false); err != nil {
		return stage.At(stage.Evidence, err)
	}
	back()
	r.Note("the proxy is away")
	return u.recovered(ctx)
}

// missing checks whether the verdict on the node, as the API shows it, names the host's record as what is missing.
func (u *unheard) missing(ctx context.Context, want bool) error {
	node, err := u.r.Mesh.Node(ctx, u.held.Node)
	if err != nil {
		return err
	}
	list := node.GetVerdict().GetMissing()
	if slices.ContainsFunc(list, func(what string) bool { return strings.HasPrefix(what, "host:") }) != want {
		return fmt.Errorf("of a verdict of %s the API names %q as missing: the host's record %t, want %t", node.GetReason(),
			list, !want, want)
	}
	u.r.Note("the verdict of %s names what is missing: %q", node.GetReason(), list)
	return nil
}

// intercepted starts proxies with foreign certificates and returns the functions that lead the ports of agents to them
// and back. back may be called several times, and if there is an error.
func intercepted(ctx context.Context, c *cluster.Cluster) (func() error, func(), error) {
	type port struct {
		service, addr string
		edge          *edge.Edge
	}
	ports := []*port{
		{service: material.NodeAPI, addr: c.Plan.Addresses.Agents},
		{service: material.Recovery, addr: c.Plan.Addresses.Enroll},
	}
	back := func() {
		for _, p := range ports {
			if p.edge != nil {
				_ = errors.Join(c.Divert(p.addr, ""), p.edge.Close()) // the drill has its result
				p.edge = nil
			}
		}
	}
	other, err := act.Foreign(c)
	if err != nil {
		return nil, back, err
	}
	for _, p := range ports {
		replicas, err := c.Replicas(p.addr)
		if err != nil {
			return nil, back, err
		}
		if p.edge, err = edge.Start(ctx, edge.Config{
			Identity: other.Identity(p.service), Roots: c.Material.ServiceRoots(), TrustDomain: cluster.TrustDomain,
			Service: p.service, Upstreams: replicas,
		}); err != nil {
			return nil, back, err
		}
	}
	return func() error {
		return errors.Join(c.Divert(ports[0].addr, ports[0].edge.Addr()), c.Divert(ports[1].addr, ports[1].edge.Addr()))
	}, back, nil
}
