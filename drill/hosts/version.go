package hosts

import (
	"context"
	"errors"
	"fmt"

	"github.com/gpuaas/mesh/drill/kit"
	"github.com/gpuaas/mesh/drill/kit/act"
	"github.com/gpuaas/mesh/drill/kit/await"
	"github.com/gpuaas/mesh/drill/kit/host"
	"github.com/gpuaas/mesh/drill/kit/mesh"
	"github.com/gpuaas/mesh/drill/kit/stage"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/mesh/cluster"
)

// withheldType is the type of task that the old agent does not know.
const withheldType = "storage.allocate"

// VersionDrift is row 25: a machine runs an agent that does not know a type of task.
func VersionDrift() kit.Drill {
	return kit.Drill{
		Name: "agent-version-drift", Slow: true,
		Injects: "the agent of a machine that serves a workspace is started again without the handler of " + withheldType +
			", as an agent from before that type",
		Sees: "`version_drift`, the node normal; a workspace that is to be made there fails with task_type_unsupported, " +
			"and the node wants an operator; the first workload serves",
		Recovers: "by an agent that knows all types: the verdict ends, and the work that was refused is done when it is " +
			"asked for again",
		Needs:  "its own mesh: a machine whose agent can be started as another",
		Expect: kit.Verdict{Reason: "version_drift", UserState: "normal", Owner: "rollout", Next: "update"},
		Mutation: "the replicas of recovery are started anew with the type among their optional_task_types: what the " +
			"agent knows is compared as before, without it; the agent lacks the type as before",
		FailsAt: stage.Detected,
		Scale:   60, // the agent reports its types when it connects
		Mutate:  act.Restarted(act.Recovery, "GPUAAS_RECOVERY_OPTIONAL_TASK_TYPES="+withheldType),
		Run:     runVersionDrift,
	}
}

func runVersionDrift(ctx context.Context, r *kit.Run) error {
	m := r.Mesh
	c, err := m.Cluster()
	if err != nil {
		return err
	}
	held, err := mesh.PlaceOnMachine(ctx, m, c)
	if err != nil {
		return stage.At(stage.Good, err)
	}
	r.About(held.ID, held.Node)
	defer r.Leave(ctx, held.ID)
	other := otherMachine(c, held)
	before, err := m.Node(ctx, held.Node)
	if err != nil {
		return stage.At(stage.Good, err)
	}
	variable := "GPUAAS_TASK_TYPES_WITHHELD=" + withheldType
	defer act.RestoreMachine(ctx, r, held)
	err = r.Inject(ctx, "the agent of "+held.Machine.Name()+" started again with "+variable+" in its environment, as the "+
		"kernel shows it",
		func(ctx context.Context) error {
			if err := held.Machine.Stop(ctx); err != nil {
				return err
			}
			held.Machine.SetEnv(variable)
			return m.StartMachine(ctx, held.Machine)
		},
		func(context.Context) error { return host.HasEnv(held.Machine.PID(), variable) })
	if err != nil {
		return err
	}
	if err := r.Detect(ctx, act.VerdictOf(m, held.Node, r.Drill.Expect.Reason)); err != nil {
		return err
	}
	if err := r.Check(ctx); err != nil {
		return err
	}
	if err := refusedThere(ctx, r, held, other); err != nil {
		return stage.At(stage.Verdict, err)
	}
	if err := held.Machine.Stop(ctx); err != nil {
		return stage.At(stage.Recover, err)
	}
	if err := m.StartMachine(ctx, held.Machine); err != nil {
		return stage.At(stage.Recover, err)
	}
	err = r.Recovered(ctx, "the node normal and connected, its workspace serves", func(ctx context.Context) error {
		if err := act.Connected(ctx, m, held.Node); err != nil {
			return err
		}
		return mesh.Answers(ctx, held.URL)
	})
	if err != nil {
		return err
	}
	err = act.SameInstance(ctx, m, held.Node, before.GetIdentity().GetNodeInstanceId(), before.GetIdentity().GetMints())
	if err != nil {
		return stage.At(stage.Evidence, err)
	}
	return r.Retire(ctx, held.ID)
}

// otherMachine returns the name of a machine that a workspace does not stand on.
func otherMachine(c *cluster.Cluster, held mesh.Held) string {
	for _, n := range c.Nodes {
		if n.Name() != held.Machine.Name() {
			return n.Name()
		}
	}
	return ""
}

// refusedThere makes a workspace while no other machine may take it, and checks that it fails with the agent's refusal
// and that the node wants an operator from then on. The first workload serves.
func refusedThere(ctx context.Context, r *kit.Run, held mesh.Held, other string) error {
	m := r.Mesh
	cordon := func(ctx context.Context, on bool) error {
		_, err := m.Client.Command.SetCordon(ctx,
			&readmodelv1.SetCordonRequest{Node: other, Cordoned: on, Reason: "drill"})
		return err
	}
	if err := cordon(ctx, true); err != nil {
		return err
	}
	defer r.Finally(ctx, func(ctx context.Context) { _ = cordon(ctx, false) }) // what fails here fails the next drill
	op, err := m.Create(ctx, mesh.FreshName("version"),
		&lifecyclev1.WorkspaceSpec{Placement: commonv1.PlacementDriver_PLACEMENT_DRIVER_STATIC})
	if err != nil {
		return err
	}
	r.About(op.GetWorkspaceId())
	defer r.Leave(ctx, op.GetWorkspaceId())
	err = await.Until(ctx, "the refusal to reach the workspace", await.Limit, func(ctx context.Context) error {
		ws, err := m.Workspace(ctx, op.GetWorkspaceId())
		if err == nil && ws.GetLastErrorCode() != "task_type_unsupported" {
			err = fmt.Errorf("it is %s at %q: %s %s", names.Of(ws.GetState()), ws.GetCurrentStep(), ws.GetLastErrorCode(),
				ws.GetLastError())
		}
		return err
	})
	if err != nil {
		return err
	}
	err = await.Until(ctx, "the node to want an operator", await.Limit, func(ctx context.Context) error {
		n, err := m.Node(ctx, held.Node)
		if err == nil && (n.GetReason() != r.Drill.Expect.Reason ||
			n.GetUserState() != commonv1.UserState_USER_STATE_OPERATOR_ACTION_REQUIRED) {
			err = fmt.Errorf("it is %s: %q", names.Of(n.GetUserState()), n.GetReason())
		}
		return err
	})
	return errors.Join(err, mesh.Answers(ctx, held.URL))
}
