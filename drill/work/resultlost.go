package work

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"strings"

	"github.com/gpuaas/mesh/drill/kit"
	"github.com/gpuaas/mesh/drill/kit/act"
	"github.com/gpuaas/mesh/drill/kit/await"
	"github.com/gpuaas/mesh/drill/kit/edge"
	"github.com/gpuaas/mesh/drill/kit/host"
	"github.com/gpuaas/mesh/drill/kit/mesh"
	"github.com/gpuaas/mesh/drill/kit/stage"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/mesh/agents"
	"github.com/gpuaas/mesh/mesh/cluster"
)

// ResultLost is row 17: the connection of an agent is cut after it has done a task and before the result is
// acknowledged.
func ResultLost() kit.Drill {
	return kit.Drill{
		Name: "dispatched-result-lost",
		Injects: "the connection of a machine's agent is led over a wire that keeps its bytes back from the moment at " +
			"which the agent starts a workload, and is cut then; once more, the result arrives and its acknowledgement is " +
			"lost; the agents' port takes no connections until that is seen",
		Sees: "the node `disconnected` and temporary; the task not ended in the first case, and ended in the second",
		Recovers: "by itself: the agent connects again and sends the result again; the task ends in its first attempt, " +
			"once, and the workload was started once",
		Needs:  "its own mesh: it stands before its port, and reads a machine's files",
		Expect: kit.Verdict{Reason: "disconnected", UserState: "temporary", Owner: "agent", Next: "wait"},
		Mutation: "the replicas of nodeapi are started anew with a keepalive_interval of an hour, an agent may be silent " +
			"for as long as the policy allows, and the wire closes the agent's end of the connection alone: what is to notice " +
			"that the other end has gone waits for longer than the budget; the agent's connection is cut as before",
		FailsAt: stage.Detected,
		Scale:   60, // a closed connection is seen at once in either form
		Mutate:  patientServers,
		Run:     runResultLost,
	}
}

// patientServers has replicas of nodeapi wait for long before they take a silent agent for gone.
func patientServers(ctx context.Context, r *kit.Run) (func(context.Context) error, error) {
	restart := act.Restarted(act.NodeAPI, "GPUAAS_NODEAPI_KEEPALIVE_INTERVAL=1h")
	before, _ := r.Policy.Get(policy.HeartbeatStaleAfterSeconds)
	key, _ := policy.Lookup(policy.HeartbeatStaleAfterSeconds)
	if err := r.Mesh.SetPolicy(ctx, policy.HeartbeatStaleAfterSeconds, key.Max); err != nil {
		return nil, err
	}
	undo, err := restart(ctx, r)
	return func(ctx context.Context) error {
		var err error
		if undo != nil {
			err = undo(ctx)
		}
		return errors.Join(err, r.Mesh.SetPolicy(ctx, policy.HeartbeatStaleAfterSeconds, before))
	}, err
}

func runResultLost(ctx context.Context, r *kit.Run) error {
	c, err := r.Mesh.Cluster()
	if err != nil {
		return err
	}
	replicas, err := c.Replicas(c.Plan.Addresses.Agents)
	if err != nil {
		return stage.At(stage.Good, err)
	}
	wire, err := edge.StartWire(ctx, replicas[0])
	if err != nil {
		return stage.At(stage.Good, err)
	}
	defer func() { _ = wire.Close() }() // the drill has its result
	ways := []bool{false, true}
	if r.Control != kit.None {
		ways = ways[:1] // both begin alike
	}
	var detected, recovered float64
	for _, arrives := range ways {
		r.Subject = nil
		l := &lostResult{
			run: r, cluster: c, wire: wire, machine: c.Nodes[0], other: c.Nodes[1].Name(), arrives: arrives,
		}
		if err := l.drill(ctx); err != nil {
			return err
		}
		detected, recovered = max(detected, r.Result.DetectedSeconds), max(recovered, r.Result.RecoveredSeconds)
	}
	r.Result.DetectedSeconds, r.Result.RecoveredSeconds = detected, recovered
	return nil
}

// lostResult is one of the two cases.
type lostResult struct {
	run     *kit.Run
	cluster *cluster.Cluster
	wire    *edge.Wire
	machine *agents.Agent
	other   string // the machine that no workspace may be made on
	arrives bool   // the result arrives, and its acknowledgement is lost
	node    *readmodelv1.Node
	pid     int
	process host.Process
	op      *lifecyclev1.Operation
	session int64             // that the cut ends
	starts  map[string]string // of the workspace's workloads, before the cut
	kept    int64             // bytes that the wire had kept back when the workload was started
}

func (l *lostResult) drill(ctx context.Context) error {
	r, m := l.run, l.run.Mesh
	defer r.Finally(ctx, l.putRight)
	if err := l.prepare(ctx); err != nil {
		return stage.At(stage.Good, err)
	}
	what := "its result"
	if l.arrives {
		what = "the acknowledgement of its result"
	}
	err := r.Inject(ctx, fmt.Sprintf("the connection of %s, process %d, cut while the wire kept %s back, after the "+
		"workload was started as its files show; the kernel shows no connection", l.machine.Name(), l.pid, what),
		l.inject, func(context.Context) error { return l.took() })
	if err != nil {
		return err
	}
	if err := r.Detect(ctx, l.verdict); err != nil {
		return err
	}
	if err := r.Check(ctx); err != nil {
		return err
	}
	if err := l.shut(false); err != nil {
		return stage.At(stage.Recover, err)
	}
	err = r.Recovered(ctx, "the agent connected, the task ended, the workspace serves", func(ctx context.Context) error {
		if err := act.Connected(ctx, m, l.node.GetNodeId()); err != nil {
			return err
		}
		return m.Serving(ctx, l.op.GetWorkspaceId(), l.op.GetEpoch())
	})
	if err != nil {
		return err
	}
	if err := l.once(ctx); err != nil {
		return stage.At(stage.Evidence, err)
	}
	return r.Retire(ctx, l.op.GetWorkspaceId())
}

// prepare leads the machine's connection over the wire, and leaves no other machine for a workspace.
func (l *lostResult) prepare(ctx context.Context) error {
	m, addr := l.run.Mesh, l.cluster.Plan.Addresses.Agents
	var err error
	if l.node, err = m.Node(ctx, l.machine.Name()); err != nil {
		return err
	}
	l.run.About(l.node.GetNodeId())
	if err := l.cluster.Divert(addr, l.wire.Addr()); err != nil {
		return err
	}
	defer func() { _ = l.cluster.Divert(addr, "") }()
	if err := l.machine.Stop(ctx); err != nil {
		return err
	}
	if err := errors.Join(l.machine.Start(), l.cordon(ctx, true)); err != nil {
		return err
	}
	l.pid = l.machine.PID()
	l.process = host.Kernel(l.pid)
	return await.Until(ctx, l.machine.Name()+" to be connected over the wire, and "+l.other+" to be cordoned",
		await.Limit, l.prepared)
}

func (l *lostResult) prepared(ctx context.Context) error {
	m := l.run.Mesh
	if err := act.Connected(ctx, m, l.node.GetNodeId()); err != nil {
		return err
	}
	now, err := m.Node(ctx, l.node.GetNodeId())
	if err != nil {
		return err
	}
	other, err := m.Node(ctx, l.other)
	if err == nil && (now.GetSession().GetSessionId() == l.node.GetSession().GetSessionId() ||
		l.wire.Connections() == 0 || !other.GetGate().GetCordoned()) {
		err = fmt.Errorf("%d connections over the wire, session %s, the other cordoned %t", l.wire.Connections(),
			now.GetSession().GetSessionId(), other.GetGate().GetCordoned())
	}
	l.session = now.GetSession().GetGeneration()
	return err
}

func (l *lostResult) cordon(ctx context.Context, on bool) error {
	_, err := l.run.Mesh.Client.Command.SetCordon(ctx,
		&readmodelv1.SetCordonRequest{Node: l.other, Cordoned: on, Reason: "drill"})
	return err
}

// shut has the agents' port take no connections, or take them again; established ones go on.
func (l *lostResult) shut(shut bool) error {
	_, err := l.cluster.ShutOut(l.cluster.Plan.Addresses.Agents, shut)
	return err
}

func (l *lostResult) putRight(ctx context.Context) {
	_ = errors.Join(l.shut(false), l.cordon(ctx, false)) // what fails here fails the next drill
	l.wire.KeepUp(false)
	l.wire.KeepDown(false)
	if l.op != nil {
		l.run.Leave(ctx, l.op.GetWorkspaceId())
	}
}

// inject makes a workspace on the machine and cuts the connection once the agent has started the workload.
func (l *lostResult) inject(ctx context.Context) error {
	m := l.run.Mesh
	l.wire.KeepUp(true)
	var err error
	if l.op, err = m.Create(ctx, mesh.FreshName("result"),
		&lifecyclev1.WorkspaceSpec{Placement: commonv1.PlacementDriver_PLACEMENT_DRIVER_STATIC}); err != nil {
		return err
	}
	l.run.About(l.op.GetWorkspaceId())
	err = await.Until(ctx, "the workload to be started", await.Limit, func(context.Context) error {
		kept := l.wire.KeptUp()
		if l.starts = l.started(); len(l.starts) == 0 {
			l.wire.PassUp(kept) // what the agent had sent before it started the workload
			return errors.New("it is not")
		}
		l.kept = kept
		return nil
	})
	if err != nil {
		return err
	}
	err = await.Until(ctx, "the result to be kept back", await.Limit, func(context.Context) error {
		if l.wire.KeptUp() == l.kept {
			return errors.New("the agent has sent nothing since the start")
		}
		return nil
	})
	if err != nil {
		return err
	}
	if l.arrives {
		if err := l.passResult(ctx); err != nil {
			return err
		}
	}
	if err := l.shut(true); err != nil {
		return err
	}
	if l.run.Control == kit.Mutated {
		l.wire.CutClients()
		return nil
	}
	l.wire.Cut()
	return nil
}

// passResult lets the result arrive, and keeps back what is sent to the agent.
func (l *lostResult) passResult(ctx context.Context) error {
	l.wire.KeepDown(true)
	before := l.wire.KeptDown()
	l.wire.KeepUp(false)
	return await.Until(ctx, "the result to arrive and its acknowledgement to be kept back", await.Limit,
		func(ctx context.Context) error {
			task, err := l.task(ctx)
			if err == nil && (task.GetState() != commonv1.TaskState_TASK_STATE_SUCCEEDED || l.wire.KeptDown() == before) {
				err = fmt.Errorf("the task is %s, and %d bytes are kept back", names.Of(task.GetState()), l.wire.KeptDown()-before)
			}
			return err
		})
}

// took checks that the workload was started, and that the kernel shows the agent, and no connection of it.
func (l *lostResult) took() error {
	if len(l.starts) == 0 {
		return errors.New("no workload was started")
	}
	if now := host.Kernel(l.pid); now.Start != l.process.Start {
		return fmt.Errorf("process %d has ended", l.pid)
	}
	count, err := host.Connections(l.pid, l.cluster.Plan.Addresses.Agents)
	if err == nil && count > 0 {
		err = fmt.Errorf("the agent has %d connections", count)
	}
	return err
}

// started returns the marks of the starts of the workspace's workloads.
func (l *lostResult) started() map[string]string {
	all, err := host.WorkloadStarts(mesh.MachineDir(l.cluster, l.machine))
	if err != nil {
		return nil // none was started yet, or its file is being written
	}
	maps.DeleteFunc(all, func(file, mark string) bool {
		return mark == "" || !strings.Contains(filepath.ToSlash(file), l.op.GetWorkspaceId())
	})
	return all
}

// task returns the task by which the workload was started.
func (l *lostResult) task(ctx context.Context) (*readmodelv1.Task, error) {
	tasks, err := act.TasksOf(ctx, l.run.Mesh, l.node.GetNodeId())
	if err != nil {
		return nil, err
	}
	var found *readmodelv1.Task
	for _, task := range tasks {
		if task.GetWorkspaceId() == l.op.GetWorkspaceId() && task.GetType() == commonv1.TaskType_TASK_TYPE_WORKLOAD_DEPLOY {
			if found != nil {
				return nil, stage.At(stage.Evidence, errors.New("the workload was deployed by two tasks"))
			}
			found = task
		}
	}
	if found == nil {
		return nil, errors.New("the API shows no task that deploys the workload")
	}
	return found, nil
}

// verdict reads the verdict on the machine, and that the task has ended in the second case alone.
func (l *lostResult) verdict(ctx context.Context) (kit.Verdict, error) {
	node, err := l.run.Mesh.Node(ctx, l.node.GetNodeId())
	v := kit.Verdict{Reason: node.GetReason(), UserState: names.Of(node.GetUserState()), Next: node.GetNextAction()}
	if err != nil {
		return v, err
	}
	if node.GetConnected() || v.Reason != l.run.Drill.Expect.Reason {
		return v, fmt.Errorf("the node is connected %t, %s to its user: %q", node.GetConnected(), v.UserState, v.Reason)
	}
	task, err := l.task(ctx)
	if err != nil {
		return v, err
	}
	if ended := task.GetState() == commonv1.TaskState_TASK_STATE_SUCCEEDED; ended != l.arrives {
		return v, fmt.Errorf("the task is %s", names.Of(task.GetState()))
	}
	return v, nil
}

// once checks that the task ended once, in its first attempt and over the session that its result came by, and that
// the workload was not started again.
func (l *lostResult) once(ctx context.Context) error {
	task, err := l.task(ctx)
	if err != nil {
		return err
	}
	var ended, over int64
	for _, t := range task.GetTransitions() {
		if t.GetState() == commonv1.TaskState_TASK_STATE_SUCCEEDED {
			ended++
			over = t.GetSessionEpoch()
		}
	}
	switch now := l.started(); {
	case !maps.Equal(now, l.starts):
		return fmt.Errorf("the workload was started again: %v, was %v", now, l.starts)
	case task.GetState() != commonv1.TaskState_TASK_STATE_SUCCEEDED || task.GetAttempt() != 1 || ended != 1 ||
		task.GetLateEvidence() != 0:
		return fmt.Errorf("task %s is %s in attempt %d, ended %d times, with %d late results", task.GetTaskId(),
			names.Of(task.GetState()), task.GetAttempt(), ended, task.GetLateEvidence())
	case (over > l.session) == l.arrives:
		return fmt.Errorf("the result came over session %d, where %d is the one that was cut", over, l.session)
	}
	l.run.Evidence(task.GetTaskId())
	l.run.Note("task %s ended once, in attempt 1, over session %d; session %d was cut; the workload was started once",
		task.GetTaskId(), over, l.session)
	return nil
}
