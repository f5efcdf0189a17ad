package unheard

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/gpuaas/mesh/drill/kit"
	"github.com/gpuaas/mesh/drill/kit/edge"
	"github.com/gpuaas/mesh/drill/kit/stage"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/mesh/cluster"
	"github.com/gpuaas/mesh/mesh/material"
)

// edgeWait is what the edge asks clients to wait: longer than an agent waits where nothing is asked for.
const edgeWait = 62 * time.Second

// EdgeLimit is row 11: an edge before the node API shows an agent a page, and then takes it for a client that asks too
// often.
func EdgeLimit() kit.Drill {
	return kit.Drill{
		Name: "edge-rate-limited", Slow: true,
		Injects: "the port of the node API is led to an edge that ends TLS, and the agent of a machine that serves a " +
			"workspace is killed; it is started again, and the edge answers its streams with a page, then once with 429 " +
			"and a Retry-After of 62 s, and then with the page again",
		Sees: "by the API alone `agent_down`; once the record on the host is brought, `edge_rate_limited` and temporary; " +
			"the workload serves; the agent asks again no sooner than the edge wants, and once",
		Recovers: "the edge is taken away: the agent opens a session by itself at its next try",
		Needs:    "its own mesh: it stands before its port, and reads the record on a machine",
		Expect:   kit.Verdict{Reason: "edge_rate_limited", UserState: "temporary", Owner: "edge", Next: "wait"},
		Mutation: staleRecord,
		FailsAt:  stage.Detected,
		Mutate:   ignoreRecords,
		Run:      runEdgeLimit,
	}
}

func runEdgeLimit(ctx context.Context, r *kit.Run) error {
	u, err := prepareUnheard(ctx, r)
	if err != nil {
		return err
	}
	defer r.Leave(ctx, u.held.ID)
	addr := u.c.Plan.Addresses.Agents
	replicas, err := u.c.Replicas(addr)
	if err != nil {
		return stage.At(stage.Good, err)
	}
	e, err := edge.Start(ctx, edge.Config{
		Identity: u.c.Material.Identity(material.NodeAPI), Roots: u.c.Material.ServiceRoots(),
		TrustDomain: cluster.TrustDomain, Service: material.NodeAPI, Upstreams: replicas,
	})
	if err != nil {
		return stage.At(stage.Good, err)
	}
	defer func() { _ = errors.Join(u.c.Divert(addr, ""), e.Close()) }() // the drill has its result
	e.Set("", edge.Page())
	err = r.Inject(ctx, fmt.Sprintf("an edge before %s that answers a page and then 429, by its own count, and the agent "+
		"of %s, process %d, killed", addr, u.held.Machine.Name(), u.pid),
		func(context.Context) error { return errors.Join(u.c.Divert(addr, e.Addr()), u.held.Machine.Kill9()) },
		func(context.Context) error {
			if len(e.Requests()) > 0 && len(limited(e)) == 0 {
				e.Set("", edge.Limited(edgeWait))
			}
			if len(limited(e)) == 0 {
				return fmt.Errorf("of %d requests none was refused as one too many", len(e.Requests()))
			}
			e.Set("", edge.Page()) // the next request is answered so that the agent comes back soon
			return nil
		})
	if err != nil {
		return err
	}
	if err := u.alone(ctx); err != nil {
		return err
	}
	if err := u.bring(ctx, commonv1.DiagnosticCode_DIAGNOSTIC_CODE_EDGE_RATE_LIMITED); err != nil {
		return err
	}
	if err := u.detect(ctx); err != nil {
		return err
	}
	if err := slowsDown(ctx, r, e); err != nil {
		return stage.At(stage.Verdict, err)
	}
	if err := u.c.Divert(addr, ""); err != nil {
		return stage.At(stage.Recover, err)
	}
	r.Note("the edge is away")
	return u.recovered(ctx)
}

// limited returns the requests that the edge refused as one too many.
func limited(e *edge.Edge) []edge.Request {
	return slices.DeleteFunc(e.Requests(), func(q edge.Request) bool { return !refused(q) })
}

func refused(q edge.Request) bool { return q.Answer.RetryAfter != 0 }

// slowsDown waits for the next request after the one that was refused, which must not come sooner than was asked for.
func slowsDown(ctx context.Context, r *kit.Run, e *edge.Edge) error {
	ctx, cancel := context.WithTimeout(ctx, 3*edgeWait)
	defer cancel()
	for n := len(e.Requests()); ; n++ {
		got := e.Requests()
		if i := slices.IndexFunc(got, refused); i+1 < len(got) {
			gap := got[i+1].At.Sub(got[i].At)
			if gap < edgeWait-100*time.Millisecond {
				return fmt.Errorf("the agent asked again after %s where %s was asked for", gap, edgeWait)
			}
			r.Note("the agent asked again %s after the edge had asked for %s", gap.Round(time.Millisecond), edgeWait)
			return nil
		}
		if _, err := e.Await(ctx, n+1); err != nil {
			return fmt.Errorf("the agent does not ask again: %w", err)
		}
	}
}
