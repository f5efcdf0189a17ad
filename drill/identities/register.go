package identities

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/gpuaas/mesh/drill/kit"
	"github.com/gpuaas/mesh/drill/kit/act"
	"github.com/gpuaas/mesh/drill/kit/await"
	"github.com/gpuaas/mesh/drill/kit/host"
	"github.com/gpuaas/mesh/drill/kit/mesh"
	"github.com/gpuaas/mesh/drill/kit/stage"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/policy"
)

// Register is row 28: an instance consumes its mint and dies, and the one that boots in its place has another key.
func Register() kit.Drill {
	return kit.Drill{
		Name: "register-401-no-live-token",
		Injects: "an instance enrols while the node API takes no newcomer, so that its certificate is never used; then " +
			"its agent is killed, its keys and state are " +
			"wiped and its first environment put back, as after a reimage: the same launch secret, another key",
		Sees:     "retryable denials counted on the workspace with their reason; the workspace temporary",
		Recovers: "by itself: the gate opens again for the instance of the present epoch; no launch, no other epoch",
		Needs:    "its own mesh: process placement on this host, and the balancer before the node API",
		Expect:   kit.Verdict{Reason: "register_failing", UserState: "temporary", Owner: "recovery", Next: "wait"},
		Mutation: "the replicas of recovery are started anew with a mint_wait of one millisecond: the gate that is to " +
			"notice a second key lets it pass and counts " +
			"nothing; the mint is consumed by a dead instance as before",
		FailsAt: stage.Detected,
		Mutate:  act.Restarted(act.Recovery, "GPUAAS_RECOVERY_MINT_WAIT=1ms"),
		Run:     runRegister,
	}
}

func runRegister(ctx context.Context, r *kit.Run) error {
	m := r.Mesh
	c, err := m.Cluster()
	if err != nil {
		return err
	}
	if err := r.Observe(ctx); err != nil {
		return err
	}
	if m.Scaled {
		// A mint lasts as long as a scaled step may stand still: the watchdog must not take the instance for missing while
		// the drill makes it wait.
		if err := m.SetPolicy(ctx, policy.SagaStepStallSeconds, "120"); err != nil {
			return stage.At(stage.Good, err)
		}
		defer r.Finally(ctx, func(ctx context.Context) {
			r.Left("the policy", m.SetPolicy(ctx, policy.SagaStepStallSeconds, mesh.Scaled()[policy.SagaStepStallSeconds]))
		})
	}
	shutOut := func(shut bool) error {
		turned, err := c.ShutOut(c.Plan.Addresses.Agents, shut)
		if !shut && turned > 0 {
			r.Note("the node API turned %d newcomers away", turned)
		}
		return err
	}
	if err := shutOut(true); err != nil {
		return stage.At(stage.Good, err)
	}
	defer func() { _ = shutOut(false) }() // open already, unless it failed before
	op, env, err := makeAndCatch(ctx, r)
	if err != nil {
		return stage.At(stage.Good, err)
	}
	id, epoch := op.GetWorkspaceId(), op.GetEpoch()
	defer r.Leave(ctx, id)
	instance := m.InstanceDir(id, epoch)
	pid, err := m.AwaitLaunch(ctx, id, epoch)
	if err != nil {
		return stage.At(stage.Good, err)
	}
	identity := filepath.Join(instance, "state", "node.json")
	if err := await.Until(ctx, "the instance to enrol", await.Limit,
		func(context.Context) error { _, err := os.Stat(identity); return err }); err != nil {
		return stage.At(stage.Good, err)
	}
	before, agent := host.IdentityDigest(instance), host.Kernel(pid)
	err = r.Inject(ctx, fmt.Sprintf("the instance's identity (its files' digest was %.12s) wiped and its agent, "+
		"process %d, killed", before, pid),
		func(context.Context) error { return host.Reimage(pid, instance, env) },
		func(context.Context) error {
			if after := host.IdentityDigest(instance); after == before {
				return errors.New("the identity's files are as they were")
			}
			return host.Gone(pid, agent)
		})
	if err = errors.Join(err, shutOut(false)); err != nil {
		return err
	}
	err = r.Detect(ctx, func(ctx context.Context) (kit.Verdict, error) {
		ws, err := m.Workspace(ctx, id)
		v := kit.Verdict{Reason: ws.GetLastErrorCode(), UserState: names.Of(ws.GetUserState())}
		if err == nil && (ws.GetRegisterFailures() == 0 || !strings.HasPrefix(ws.GetLastError(), "mint_consumed")) {
			err = fmt.Errorf("%d registers are counted, the last error is %q; the workspace is %s at %s",
				ws.GetRegisterFailures(), ws.GetLastError(),
				names.Of(ws.GetState()), ws.GetCurrentStep())
		}
		return v, err
	})
	if err != nil {
		return err
	}
	if err := r.Check(ctx); err != nil {
		return err
	}
	refused := int32(0)
	err = r.Recovered(ctx, "the instance of the same epoch registered with its new key, the workspace active, its "+
		"endpoint answers", func(ctx context.Context) error {
		if ws, err := m.Workspace(ctx, id); err == nil {
			refused = max(refused, ws.GetRegisterFailures())
		}
		return m.Serving(ctx, id, epoch)
	})
	if err != nil {
		return err
	}
	if err := oneLaunch(m, id); err != nil {
		return stage.At(stage.Evidence, err)
	}
	ws, err := m.Workspace(ctx, id)
	if err != nil {
		return stage.At(stage.Evidence, err)
	}
	node, err := m.Node(ctx, ws.GetNodeId())
	if err != nil {
		return stage.At(stage.Evidence, err)
	}
	if mints := node.GetIdentity().GetMints(); mints < 2 {
		return stage.At(stage.Evidence, fmt.Errorf("the node has %d mints: no second key registered", mints))
	}
	r.Evidence(ws.GetNodeId(), node.GetIdentity().GetNodeInstanceId())
	r.Note("%d registers were refused and then the second key was taken", refused)
	return r.Retire(ctx, id)
}

// oneLaunch checks that a workspace had one launch in all.
func oneLaunch(m *mesh.Mesh, id string) error {
	ledger, err := m.Launches()
	if err != nil {
		return err
	}
	n, _, err := host.CheckLaunches(ledger, id)
	if err == nil && n != 1 {
		err = fmt.Errorf("the ledger has %d launches", n)
	}
	return err
}

// makeAndCatch makes a workspace and returns it with the environment that its instance boots with. An agent may be
// faster than this drill on a busy machine: then another is made.
func makeAndCatch(ctx context.Context, r *kit.Run) (*lifecyclev1.Operation, []byte, error) {
	const tries = 5
	for try := 1; ; try++ {
		op, err := r.Mesh.Create(ctx, mesh.FreshName("register"), nil)
		if err != nil {
			return nil, nil, err
		}
		r.About(op.GetWorkspaceId())
		r.Evidence(op.GetOperationId())
		env, err := host.FirstEnvironment(ctx,
			filepath.Join(r.Mesh.InstanceDir(op.GetWorkspaceId(), op.GetEpoch()), "etc", "node-agent.env"))
		if err == nil {
			return op, env, nil
		}
		r.Leave(ctx, op.GetWorkspaceId())
		if !errors.Is(err, host.ErrLate) || try == tries {
			return nil, nil, err
		}
	}
}
