package outages

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"

	"github.com/gpuaas/mesh/drill/kit"
	"github.com/gpuaas/mesh/drill/kit/act"
	"github.com/gpuaas/mesh/drill/kit/host"
	"github.com/gpuaas/mesh/drill/kit/mesh"
	"github.com/gpuaas/mesh/drill/kit/stage"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/policy"
)

// ShortOutage is row 1: a machine's agent is killed, stays away for longer than an agent may be silent, and returns.
func ShortOutage() kit.Drill {
	return kit.Drill{
		Name: "short-node-outage",
		Injects: "the agent of a machine is killed and stays away, while a workload that it had started runs on; once " +
			"the outage is seen, it is started again from the same directory",
		Sees: "the node not connected, `agent_down` and temporary; the workload serves",
		Recovers: "by itself: the agent opens a session with the certificate that it had; no enrolment, the same serial, " +
			"the workload was never started again; recovery asks it once for its host's record",
		Needs:  "its own mesh: a machine whose agent can be killed",
		Expect: kit.Verdict{Reason: "agent_down", UserState: "temporary", Owner: "agent / host", Next: "wait"},
		Mutation: "node.heartbeat_stale_after_seconds is set to its upper bound: what is to tell a silent agent from one " +
			"that has just gone waits for longer than the budget; the agent is killed as before",
		FailsAt: stage.Detected,
		Scale:   10, // a scaled agent may be silent for six seconds
		Mutate:  lateSilence,
		Run:     runShortOutage,
	}
}

// lateSilence puts the silence after which an agent is down out of reach, as an operator could, and returns the
// function that puts it back.
func lateSilence(ctx context.Context, r *kit.Run) (func(context.Context) error, error) {
	before, _ := r.Policy.Get(policy.HeartbeatStaleAfterSeconds)
	key, _ := policy.Lookup(policy.HeartbeatStaleAfterSeconds)
	back := func(ctx context.Context) error {
		return r.Mesh.SetPolicy(ctx, policy.HeartbeatStaleAfterSeconds, before)
	}
	return back, r.Mesh.SetPolicy(ctx, policy.HeartbeatStaleAfterSeconds, key.Max)
}

func runShortOutage(ctx context.Context, r *kit.Run) error {
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
	before, err := m.Node(ctx, held.Node)
	if err != nil {
		return stage.At(stage.Good, err)
	}
	r.Evidence(before.GetIdentity().GetNodeInstanceId(), before.GetSession().GetSessionId())
	collected, err := recordsCollected(ctx, m, held.Node)
	if err != nil {
		return stage.At(stage.Good, err)
	}
	starts, err := host.WorkloadStarts(held.Dir)
	if err != nil {
		return stage.At(stage.Good, err)
	}
	pid := held.Machine.PID()
	agent, files := host.Kernel(pid), host.IdentityDigest(held.Dir)
	// It runs, unless the drill failed.
	defer r.Finally(ctx, func(ctx context.Context) { _ = m.StartMachine(ctx, held.Machine) })
	err = r.Inject(ctx, fmt.Sprintf("the agent of %s, process %d, killed; its identity's digest is %.12s",
		held.Machine.Name(), pid, files),
		func(context.Context) error {
			held.Machine.LetDie()
			return held.Machine.Kill9()
		},
		func(context.Context) error { return host.Gone(pid, agent) })
	if err != nil {
		return err
	}
	err = r.Detect(ctx, func(ctx context.Context) (kit.Verdict, error) {
		node, err := m.Node(ctx, held.Node)
		v := kit.Verdict{
			Reason: node.GetReason(), UserState: names.Of(node.GetUserState()), Next: node.GetNextAction(),
		}
		if err == nil && (node.GetConnected() || v.Reason != r.Drill.Expect.Reason) {
			err = fmt.Errorf("the node is connected %t, %s to its user: %q", node.GetConnected(), v.UserState, v.Reason)
		}
		return v, err
	})
	if err != nil {
		return err
	}
	if err := r.Check(ctx); err != nil {
		return err
	}
	if err := mesh.Answers(ctx, held.URL); err != nil {
		return stage.At(stage.Verdict, fmt.Errorf("the workload does not serve while its agent is away: %w", err))
	}
	if err := held.Machine.Start(); err != nil {
		return stage.At(stage.Recover, err)
	}
	err = r.Recovered(ctx, "the node connected with the same serial and instance, admitted, normal and proven healthy; "+
		"the workspace serves; its agent has returned its host's record", func(ctx context.Context) error {
		if err := act.Healthy(ctx, m, held.Node); err != nil {
			return err
		}
		if now, err := recordsCollected(ctx, m, held.Node); err != nil || now == collected {
			return cmp.Or(err, errors.New("no record of its host was collected since"))
		}
		ws, err := m.Workspace(ctx, held.ID)
		if err != nil {
			return err
		}
		return m.Serving(ctx, held.ID, ws.GetEpoch())
	})
	if err != nil {
		return err
	}
	after, err := m.Node(ctx, held.Node)
	if err != nil {
		return stage.At(stage.Evidence, err)
	}
	r.Evidence(after.GetSession().GetSessionId())
	was, is := before.GetIdentity(), after.GetIdentity()
	if now, err := recordsCollected(ctx, m, held.Node); err != nil || now != collected+1 {
		return stage.At(stage.Evidence, cmp.Or(err, fmt.Errorf("%d records were collected for one verdict", now-collected)))
	}
	switch now, err := host.WorkloadStarts(held.Dir); {
	case err != nil:
		return stage.At(stage.Evidence, err)
	case !maps.Equal(now, starts):
		return stage.At(stage.Evidence, fmt.Errorf("workloads were started again: %v, were %v", now, starts))
	case is.GetCurrentSerial() != was.GetCurrentSerial() || is.GetNodeInstanceId() != was.GetNodeInstanceId() ||
		is.GetMints() != was.GetMints():
		return stage.At(stage.Evidence, fmt.Errorf("the identity is %v, was %v", is, was))
	case host.IdentityDigest(held.Dir) != files:
		return stage.At(stage.Evidence, errors.New("the files of the agent's identity are not as they were"))
	}
	r.Note("the serial is %s as before, in generation %d after %d", is.GetCurrentSerial(),
		after.GetSession().GetGeneration(), before.GetSession().GetGeneration())
	return r.Retire(ctx, held.ID)
}

// recordsCollected returns how many records of its host the agent of a node has returned.
func recordsCollected(ctx context.Context, m *mesh.Mesh, node string) (int, error) {
	tasks, err := act.TasksOf(ctx, m, node)
	n := 0
	for _, task := range tasks {
		if task.GetType() == commonv1.TaskType_TASK_TYPE_DIAGNOSTICS_COLLECT &&
			task.GetState() == commonv1.TaskState_TASK_STATE_SUCCEEDED {
			n++
		}
	}
	return n, err
}
