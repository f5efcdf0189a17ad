package hosts

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/gpuaas/mesh/drill/kit"
	"github.com/gpuaas/mesh/drill/kit/act"
	"github.com/gpuaas/mesh/drill/kit/await"
	"github.com/gpuaas/mesh/drill/kit/host"
	"github.com/gpuaas/mesh/drill/kit/mesh"
	"github.com/gpuaas/mesh/drill/kit/stage"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
)

// RouteDrift is row 15: a machine gets another address.
func RouteDrift() kit.Drill {
	return kit.Drill{
		Name: "ip-route-drift", Slow: true,
		Injects: "the table of routes from which the agent of a machine reads its addresses gets one more, while a " +
			"workspace stands there and the agent runs",
		Sees:     "`network_facts_drift`, the node is normal; the identity is untouched, the workload serves",
		Recovers: "by itself: the new addresses are recorded at once, and the verdict ends with the next sweep; no enrolment",
		Needs:    "its own mesh: a machine whose agent reads the facts of its host below a directory of the drill's",
		Expect:   kit.Verdict{Reason: "network_facts_drift", UserState: "normal", Owner: "recovery", Next: "sweep"},
		Mutation: "the agent is started with --facts-every of an hour: what is to notice the change runs as before and " +
			"never gets there; the table is replaced as before",
		FailsAt: stage.Detected,
		Scale:   60, // the agent reads the files every second in either form
		Run:     runRouteDrift,
	}
}

// otherAddress is the address that the machine gets.
const otherAddress = "203.0.113.77"

func runRouteDrift(ctx context.Context, r *kit.Run) error {
	m := r.Mesh
	held, root, err := onFacts(ctx, r)
	if err != nil {
		return stage.At(stage.Good, err)
	}
	defer r.Leave(ctx, held.ID)
	defer act.RestoreMachine(ctx, r, held)
	before, err := m.Node(ctx, held.Node)
	if err != nil {
		return stage.At(stage.Good, err)
	}
	pid := held.Machine.PID()
	agent, files, was := host.Kernel(pid), host.IdentityDigest(held.Dir), host.FactsDigest(root)
	err = r.Inject(ctx, fmt.Sprintf("an address of %s added below %s: the digest of its table is no more %.12s",
		held.Machine.Name(), root, was),
		func(context.Context) error { return host.AddAddress(root, otherAddress) },
		func(context.Context) error { return factsChanged(root, was) })
	if err != nil {
		return err
	}
	if err := r.Detect(ctx, addressSeen(r, held.Node)); err != nil {
		return err
	}
	defer r.Finally(ctx, func(ctx context.Context) { // before the machine is as it was
		r.Left("the addresses", addressesBack(ctx, r, held))
	})
	if err := r.Check(ctx); err != nil {
		return err
	}
	err = r.Recovered(ctx, "the node without a reason, connected, its workspace serves", func(ctx context.Context) error {
		if err := act.Connected(ctx, m, held.Node); err != nil {
			return err
		}
		return mesh.Answers(ctx, held.URL)
	})
	if err != nil {
		return err
	}
	after, err := m.Node(ctx, held.Node)
	if err != nil {
		return stage.At(stage.Evidence, err)
	}
	is, as := after.GetIdentity(), before.GetIdentity()
	switch {
	case is.GetCurrentSerial() != as.GetCurrentSerial() || is.GetNodeInstanceId() != as.GetNodeInstanceId() ||
		is.GetMints() != as.GetMints():
		return stage.At(stage.Evidence, fmt.Errorf("the identity is %v, was %v", is, as))
	case host.IdentityDigest(held.Dir) != files:
		return stage.At(stage.Evidence, errors.New("the files of the agent's identity are not as they were"))
	case host.Gone(pid, agent) == nil:
		return stage.At(stage.Evidence, errors.New("the agent has ended"))
	}
	return r.Retire(ctx, held.ID)
}

// addressSeen returns what reads the verdict on a node until its evidence names the address: an interface of this host
// may have come or gone while the agent was started on the facts of the drill, which is another verdict of this reason.
func addressSeen(r *kit.Run, node string) func(context.Context) (kit.Verdict, error) {
	verdict := act.VerdictOf(r.Mesh, node, r.Drill.Expect.Reason)
	return func(ctx context.Context) (kit.Verdict, error) {
		n, err := r.Mesh.Node(ctx, node)
		if err == nil && !slices.ContainsFunc(n.GetVerdict().GetEvidence(), func(e *recoveryv1.Evidence) bool {
			return strings.Contains(e.GetDetail(), otherAddress)
		}) {
			err = fmt.Errorf("no evidence names %s: %v", otherAddress, n.GetVerdict().GetEvidence())
		}
		if err != nil {
			return kit.Verdict{}, err
		}
		return verdict(ctx)
	}
}

// addressesBack starts a machine's agent anew, which reads the addresses of this host again. That is another change of
// them: it is seen, and over, before this returns, or the next drill would be accused of it. A table that was put back
// under a running agent would be seen later: a session reports changed addresses once a minute.
func addressesBack(ctx context.Context, r *kit.Run, held mesh.Held) error {
	m := r.Mesh
	over := func(ctx context.Context) error { return act.Connected(ctx, m, held.Node) }
	if err := await.Until(ctx, "the new addresses to be known", await.Limit, over); err != nil {
		return err
	}
	if err := errors.Join(held.Machine.Stop(ctx), held.Machine.Start()); err != nil {
		return err
	}
	seen := act.VerdictOf(m, held.Node, r.Drill.Expect.Reason)
	err := await.Until(ctx, "the former addresses to be seen", await.Limit, func(ctx context.Context) error {
		_, err := seen(ctx)
		return err
	})
	if err != nil {
		return err
	}
	return await.Until(ctx, "the former addresses to be known", await.Limit, over)
}
