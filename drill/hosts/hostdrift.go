package hosts

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"

	"github.com/gpuaas/mesh/drill/kit"
	"github.com/gpuaas/mesh/drill/kit/act"
	"github.com/gpuaas/mesh/drill/kit/await"
	"github.com/gpuaas/mesh/drill/kit/host"
	"github.com/gpuaas/mesh/drill/kit/mesh"
	"github.com/gpuaas/mesh/drill/kit/stage"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/names"
)

// byRuntime is who cordons a node whose host is not as it was accepted.
const byRuntime = "verdict:host_runtime_drift"

// HostRuntime is row 33: driver and kernel of a machine change under its workspace.
func HostRuntime() kit.Drill {
	return kit.Drill{
		Name: "host-runtime-drift", Slow: true,
		Injects: "the files from which the agent of a machine reads kernel and GPU driver are replaced, while a workspace " +
			"stands there and the agent runs",
		Sees: "`host_runtime_drift`, the node wants an operator and is cordoned by the verdict; a probe completes, a " +
			"recreation is refused for it; the workload serves",
		Recovers: "by evidence: with the former files the verdict and its cordon end by themselves; and once more, by an " +
			"operator who accepts the new ones",
		Needs: "its own mesh: a machine whose agent reads the facts of its host below a directory of the drill's",
		Expect: kit.Verdict{
			Reason: "host_runtime_drift", UserState: "operator_action_required", Owner: "provider", Next: "diagnose",
		},
		Mutation: "the agent is started with --facts-every of an hour: what is to notice the change runs as before and " +
			"never gets there; the files are replaced as before",
		FailsAt: stage.Detected,
		Scale:   10, // the agent reads the files every second in either form
		Run:     runHostRuntime,
	}
}

func runHostRuntime(ctx context.Context, r *kit.Run) error {
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
	kernel, err := host.Fact(root, host.FactKernel)
	if err != nil {
		return stage.At(stage.Good, err)
	}
	was := host.FactsDigest(root)
	err = r.Inject(ctx, fmt.Sprintf("kernel and GPU driver of %s replaced below %s: the digest of both files is no more "+
		"%.12s", held.Machine.Name(), root, was),
		func(context.Context) error {
			return errors.Join(host.SetFact(root, host.FactKernel, "6.99.0-drill\n"), host.SetDriver(root, "570.2"))
		},
		func(context.Context) error { return factsChanged(root, was) })
	if err != nil {
		return err
	}
	if err := r.Detect(ctx, cordonedBy(m, held.Node, r.Drill.Expect.Reason)); err != nil {
		return err
	}
	if err := r.Check(ctx); err != nil {
		return err
	}
	if err := diagnosedOnly(ctx, m, held); err != nil {
		return stage.At(stage.Verdict, err)
	}
	if err := back(root, kernel); err != nil {
		return stage.At(stage.Recover, err)
	}
	err = r.Recovered(ctx, "the node normal and connected, no more cordoned, and its workspace serves",
		func(ctx context.Context) error {
			if err := uncordoned(ctx, m, held.Node); err != nil {
				return err
			}
			return mesh.Answers(ctx, held.URL)
		})
	if err != nil {
		return err
	}
	if err := accepted(ctx, r, held, root, kernel); err != nil {
		return stage.At(stage.Recover, err)
	}
	err = act.SameInstance(ctx, m, held.Node, before.GetIdentity().GetNodeInstanceId(), before.GetIdentity().GetMints())
	if err != nil {
		return stage.At(stage.Evidence, err)
	}
	return r.Retire(ctx, held.ID)
}

// onFacts places a workspace on a machine whose agent reads the facts of its host below the returned directory, which
// are those of this host.
func onFacts(ctx context.Context, r *kit.Run) (mesh.Held, string, error) {
	c, err := r.Mesh.Cluster()
	if err != nil {
		return mesh.Held{}, "", err
	}
	held, err := mesh.PlaceOnMachine(ctx, r.Mesh, c)
	if err != nil {
		return held, "", err
	}
	r.About(held.ID, held.Node)
	root := filepath.Join(held.Dir, "facts")
	env, err := host.FactsRoot(root)
	if err != nil {
		return held, "", err
	}
	every := "1s"
	if r.Control == kit.Mutated {
		every = "1h"
	}
	return held, root, act.RestartMachine(ctx, r.Mesh, held, env, "--facts-every", every)
}

// factsChanged returns nil if the files below a facts root are not as they were.
func factsChanged(root, was string) error {
	if host.FactsDigest(root) == was {
		return errors.New("the files are as they were")
	}
	return nil
}

// cordonedBy returns what reads the verdict on a node until it has the given reason and has cordoned the node.
func cordonedBy(m *mesh.Mesh, node, reason string) func(context.Context) (kit.Verdict, error) {
	read := act.VerdictOf(m, node, reason)
	return func(ctx context.Context) (kit.Verdict, error) {
		v, err := read(ctx)
		if err != nil {
			return v, err
		}
		n, err := m.Node(ctx, node)
		if gate := n.GetGate(); err == nil && gate.GetCordonedBy() != byRuntime {
			err = fmt.Errorf("the node is cordoned %t by %q", gate.GetCordoned(), gate.GetCordonedBy())
		}
		return v, err
	}
}

func uncordoned(ctx context.Context, m *mesh.Mesh, node string) error {
	if err := act.Connected(ctx, m, node); err != nil {
		return err
	}
	n, err := m.Node(ctx, node)
	if err == nil && n.GetGate().GetCordoned() {
		err = fmt.Errorf("the node is cordoned by %q", n.GetGate().GetCordonedBy())
	}
	return err
}

// diagnosedOnly checks that a probe of a cordoned node completes, that its workspace is not recreated there, and that
// its workload serves.
func diagnosedOnly(ctx context.Context, m *mesh.Mesh, held mesh.Held) error {
	probe, err := m.Client.Command.ProbeNode(ctx, &readmodelv1.ProbeNodeRequest{Node: held.Node})
	if err != nil {
		return fmt.Errorf("ask for a probe: %w", err)
	}
	err = await.Until(ctx, "the probe of the cordoned node", await.Limit, func(ctx context.Context) error {
		all, err := act.TasksOf(ctx, m, held.Node)
		if err != nil {
			return err
		}
		if task := all[probe.GetTask().GetTaskId()]; task.GetState() != commonv1.TaskState_TASK_STATE_SUCCEEDED {
			return fmt.Errorf("it is %s", names.Of(task.GetState()))
		}
		return nil
	})
	if err != nil {
		return err
	}
	if err := notRecreated(ctx, m, held.ID); err != nil {
		return err
	}
	return mesh.Answers(ctx, held.URL)
}

// notRecreated checks that a recreation of a workspace is refused for the host that it is on, and listed so.
func notRecreated(ctx context.Context, m *mesh.Mesh, workspace string) error {
	const kind, reason = commonv1.OperationKind_OPERATION_KIND_RECREATE, commonv1.Reason_REASON_HOST_RUNTIME_DRIFT
	listed, err := m.Client.Query.GetActions(ctx, &readmodelv1.GetActionsRequest{Workspace: workspace})
	if err != nil {
		return fmt.Errorf("list the possible operations: %w", err)
	}
	for _, o := range listed.GetActions() {
		if o.GetKind() == kind && (o.GetPossible() || o.GetReason() != reason || len(o.GetUnmet()) == 0) {
			return fmt.Errorf("a recreation is listed as %v", o)
		}
	}
	_, err = m.Client.Command.OperateWorkspace(ctx, &readmodelv1.OperateWorkspaceRequest{
		Workspace: workspace, Kind: kind, Reason: "drill", IdempotencyKey: ids.New(),
	})
	if !fault.Has(err, reason) {
		return fmt.Errorf("a recreation on the host that differs ended with: %w", err)
	}
	return nil
}

// accepted changes the driver once more, has an operator accept it, and then does the same with the former one.
func accepted(ctx context.Context, r *kit.Run, held mesh.Held, root, kernel string) error {
	for _, change := range []func() error{
		func() error { return host.SetDriver(root, "580.1") },
		func() error { return back(root, kernel) },
	} {
		if err := change(); err != nil {
			return err
		}
		read := cordonedBy(r.Mesh, held.Node, r.Drill.Expect.Reason)
		err := await.Until(ctx, "the change to be seen", await.Limit, func(ctx context.Context) error {
			_, err := read(ctx)
			return err
		})
		if err != nil {
			return err
		}
		answer, err := r.Mesh.Client.HostFacts.AcceptHostFacts(ctx,
			&readmodelv1.AcceptHostFactsRequest{Node: held.Node, Reason: "drill"})
		if err != nil {
			return fmt.Errorf("accept the facts: %w", err)
		}
		r.Note("accepted: %s", answer.GetAccepted())
		err = await.Until(ctx, "the accepted facts to end the verdict", await.Limit,
			func(ctx context.Context) error { return uncordoned(ctx, r.Mesh, held.Node) })
		if err != nil {
			return err
		}
	}
	return nil
}

// back gives a facts root the kernel of before, and no version of a driver.
func back(root, kernel string) error {
	return errors.Join(host.SetFact(root, host.FactKernel, kernel), host.SetDriver(root, ""))
}
