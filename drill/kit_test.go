package drill_test

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/gpuaas/mesh/drill/kit/await"
	"github.com/gpuaas/mesh/drill/kit/edge"
	"github.com/gpuaas/mesh/drill/kit/host"
	"github.com/gpuaas/mesh/drill/kit/mesh"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/mesh/cluster"
	"github.com/gpuaas/mesh/mesh/material"
)

// rig is a mesh of the drills' own, and its first machine.
type rig struct {
	*testing.T

	mesh    *mesh.Mesh
	cluster *cluster.Cluster
}

// runFaults runs, on one real mesh, faults of drill/kit that no drill needs yet.
func runFaults(t *testing.T) {
	testkit.IO(t)
	ctx, cancel := context.WithTimeout(t.Context(), 15*time.Minute)
	defer cancel()
	m := up(ctx, t)
	c, err := m.Cluster()
	if err != nil {
		t.Fatal(err)
	}
	for _, part := range []struct {
		name string
		run  func(ctx context.Context, t rig)
	}{
		{"facts of a root", factsChange},
		{"a replica a day ahead", replicaAhead},
		{"an edge before agents", edgeLimits},
		{"an edge before enrolment", edgeLimitsEnrolment},
	} {
		t.Run(part.name, func(t *testing.T) { part.run(ctx, rig{T: t, mesh: m, cluster: c}) })
	}
}

func (t rig) must(err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func (t rig) node(ctx context.Context) *readmodelv1.Node {
	t.Helper()
	n, err := t.mesh.Node(ctx, t.cluster.Nodes[0].Name())
	t.must(err)
	return n
}

// until waits until the first machine's node is as wanted.
func (t rig) until(ctx context.Context, what string, check func(n *readmodelv1.Node) error) {
	t.Helper()
	t.must(await.Until(ctx, what, await.Limit, func(ctx context.Context) error {
		n, err := t.mesh.Node(ctx, t.cluster.Nodes[0].Name())
		if err != nil {
			return err
		}
		return check(n)
	}))
}

func normal(n *readmodelv1.Node) error {
	if !n.GetConnected() || !n.GetGate().GetAdmitted() || n.GetReason() != "" {
		return fmt.Errorf("connected %t, admitted %t, %q", n.GetConnected(), n.GetGate().GetAdmitted(), n.GetReason())
	}
	return nil
}

// factsChange changes kernel and driver under a running agent.
func factsChange(ctx context.Context, t rig) {
	machine, root := t.cluster.Nodes[0], filepath.Join(t.cluster.Dir(), "facts")
	env, err := host.FactsRoot(root)
	t.must(err)
	t.must(host.SetDriver(root, "550.54.15"))
	t.must(machine.Stop(ctx))
	machine.SetEnv(env)
	machine.SetArgs("--facts-every", "1s")
	t.must(t.mesh.StartMachine(ctx, machine))
	pid := machine.PID()
	has := func(kernel, driver string) func(n *readmodelv1.Node) error {
		return func(n *readmodelv1.Node) error {
			facts := n.GetGate().GetHost()
			if gpus := facts.GetGpus(); len(gpus) == 0 || gpus[0].GetDriverVersion() != driver ||
				(kernel != "" && facts.GetKernel() != kernel) {
				return fmt.Errorf("the facts are %v", facts)
			}
			return nil
		}
	}
	t.until(ctx, "the first driver", has("", "550.54.15"))
	t.must(host.SetFact(root, host.FactKernel, "6.99.0-drill\n"))
	t.must(host.SetDriver(root, "570.2"))
	t.until(ctx, "the next kernel and driver", has("6.99.0-drill", "570.2"))
	if machine.PID() != pid {
		t.Error("the agent was started again")
	}
	t.must(machine.Stop(ctx))
	t.must(t.mesh.StartMachine(ctx, machine))
	t.until(ctx, "the facts of the host", func(n *readmodelv1.Node) error {
		if n.GetGate().GetHost().GetKernel() == "6.99.0-drill" {
			return errors.New("they are those of the root")
		}
		return nil
	})
}

// replicaAhead leaves agents only a replica of nodeapi whose host's clock is a day ahead, which is beyond the end of
// their certificates: it judges them by the database's clock.
func replicaAhead(ctx context.Context, t rig) {
	before := t.node(ctx)
	ahead, well := t.cluster.NodeAPI[1], t.cluster.NodeAPI[0]
	t.must(ahead.Stop(ctx))
	t.must(ahead.Start("GPUAAS_CLOCK_OFFSET=24h"))
	t.must(ahead.AwaitReady(ctx))
	t.must(well.Stop(ctx))
	t.until(ctx, "a session at the replica that is ahead", func(n *readmodelv1.Node) error {
		if n.GetReplicaId() != ahead.Replica() {
			return fmt.Errorf("it is at %s, not %s", n.GetReplicaId(), ahead.Replica())
		}
		return normal(n)
	})
	now := t.node(ctx)
	was, is := before.GetIdentity(), now.GetIdentity()
	if is.GetCurrentSerial() != was.GetCurrentSerial() || is.GetAlarm() != "" ||
		is.GetNodeInstanceId() != was.GetNodeInstanceId() {
		t.Errorf("the identity is %v, was %v", is, was)
	}
	for what, at := range map[string]time.Time{
		"last heartbeat": now.GetLastHeartbeatAt().AsTime(), "opened": now.GetSession().GetOpenedAt().AsTime(),
	} {
		if off := time.Since(at).Abs(); off > 10*time.Minute {
			t.Errorf("%s is %s off", what, off)
		}
	}
	t.must(well.Start())
	t.must(well.AwaitReady(ctx))
	t.must(t.mesh.Restart(ctx, t.cluster.NodeAPI[1:]))
}

// edge starts an edge before an address of the mesh and leads newcomers to it.
func (t rig) edge(ctx context.Context, service, addr string) *edge.Edge {
	t.Helper()
	replicas, err := t.cluster.Replicas(addr)
	t.must(err)
	e, err := edge.Start(ctx, edge.Config{
		Identity: t.cluster.Material.Identity(service), Roots: t.cluster.Material.ServiceRoots(),
		TrustDomain: cluster.TrustDomain, Service: service, Upstreams: replicas,
	})
	t.must(err)
	t.must(t.cluster.Divert(addr, e.Addr()))
	t.Cleanup(func() {
		if err := errors.Join(t.cluster.Divert(addr, ""), e.Close()); err != nil {
			t.Error(err)
		}
	})
	return e
}

// edgeLimits has an edge return a page, and then 429, for an agent's streams. The agent slows down, and says so
// afterwards.
func edgeLimits(ctx context.Context, t rig) {
	before, addr := t.node(ctx), t.cluster.Plan.Addresses.Agents
	e := t.edge(ctx, material.NodeAPI, addr)
	e.Set("", edge.Page())
	t.must(t.cluster.Nodes[0].Kill9()) // it is started again
	_, err := e.Await(ctx, 1)
	t.must(err)
	const wait = 62 * time.Second // longer than an agent waits where none is asked for
	e.Set("", edge.Limited(wait))
	limited := func(n int) []edge.Request {
		t.Helper()
		for total := n; ; total++ {
			all, err := e.Await(ctx, total)
			t.must(err)
			all = slices.DeleteFunc(all, func(r edge.Request) bool { return r.Answer.RetryAfter == 0 })
			if len(all) >= n {
				return all
			}
		}
	}
	limited(1)
	t.until(ctx, "the node to be away", func(n *readmodelv1.Node) error {
		if n.GetConnected() || n.GetUserState() != commonv1.UserState_USER_STATE_TEMPORARY {
			return fmt.Errorf("connected %t, %s", n.GetConnected(), n.GetUserState())
		}
		return nil
	})
	two := limited(2)
	if gap := two[1].At.Sub(two[0].At); gap < wait-100*time.Millisecond {
		t.Errorf("the agent tried again %s after a 429 that asked for %s", gap, wait)
	}
	t.must(t.cluster.Divert(addr, ""))
	t.until(ctx, "the node to be back", normal)
	now := t.node(ctx)
	if now.GetIdentity().GetCurrentSerial() != before.GetIdentity().GetCurrentSerial() {
		t.Error("the agent has another certificate")
	}
	if !slices.ContainsFunc(now.GetSession().GetDiagnostics(), func(d *commonv1.Diagnostic) bool {
		return d.GetCode() == commonv1.DiagnosticCode_DIAGNOSTIC_CODE_EDGE_RATE_LIMITED
	}) {
		t.Errorf("the agent does not say that an edge limited it: %v", now.GetSession().GetDiagnostics())
	}
	t.Logf("the edge got %d requests", len(e.Requests()))
}

// edgeLimitsEnrolment limits the enrolment of a machine, and then passes it on.
func edgeLimitsEnrolment(ctx context.Context, t rig) {
	machine, before := t.cluster.Nodes[0], t.node(ctx)
	_, err := t.mesh.Client.Command.ChangeNodeIdentity(ctx, &readmodelv1.ChangeNodeIdentityRequest{
		Node: machine.Name(), Verb: recoveryv1.IdentityVerb_IDENTITY_VERB_HOLD, Reason: "test",
	})
	t.must(err)
	token, err := t.mesh.Client.Command.EnrollNode(ctx, &readmodelv1.EnrollNodeRequest{Name: machine.Name()})
	t.must(err)
	t.must(machine.Stop(ctx))
	t.must(host.Wipe(mesh.MachineDir(t.cluster, machine)))
	t.must(machine.Furnish(token.GetToken()))
	e := t.edge(ctx, material.Recovery, t.cluster.Plan.Addresses.Enroll)
	const wait = 4 * time.Second
	e.Set("/gpuaas.recovery.v1.EnrollmentService/", edge.Limited(wait))
	t.must(machine.Start())
	two, err := e.Await(ctx, 2)
	t.must(err)
	if gap := two[1].At.Sub(two[0].At); gap < wait-100*time.Millisecond {
		t.Errorf("the agent tried again %s after a 429 that asked for %s", gap, wait)
	}
	e.Set("/gpuaas.recovery.v1.EnrollmentService/", edge.Answer{})
	t.until(ctx, "the node to be enrolled through the edge", func(n *readmodelv1.Node) error {
		if n.GetIdentity().GetNodeInstanceId() == before.GetIdentity().GetNodeInstanceId() {
			return errors.New("it is the instance that it was")
		}
		return normal(n)
	})
}
