package work

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/gpuaas/mesh/drill/kit"
	"github.com/gpuaas/mesh/drill/kit/act"
	"github.com/gpuaas/mesh/drill/kit/await"
	"github.com/gpuaas/mesh/drill/kit/host"
	"github.com/gpuaas/mesh/drill/kit/mesh"
	"github.com/gpuaas/mesh/drill/kit/stage"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/policy"
)

const (
	// probesAsked is how many tasks wait for the agent.
	probesAsked = 5
	// probeWindow is how long one of them may wait, as the API's help says.
	probeWindow = time.Minute
	// probeEnd is how long before the end of the window the fault begins, and longer than a fault may take to be seen:
	// until then the agent could still take the tasks.
	probeEnd = await.Took + 5*time.Second
)

// BacklogStale is row 16: tasks expire in the queue while their node is away.
func BacklogStale() kit.Drill {
	return kit.Drill{
		Name: "task-backlog-stale", Slow: true,
		Injects: "tasks are asked of a machine whose agent is killed, and it stays away until none of them may start any " +
			"more; then it is started again",
		Sees: "once the node is back `task_backlog_stale` and temporary; the tasks ended as expired, none is shown as open " +
			"or was dispatched; the workload serves",
		Recovers: "by the next sweep, which finds nothing more: the node is normal, the expired tasks are history, and a " +
			"new task completes",
		Needs: "its own mesh: a machine whose agent can be killed",
		Expect: kit.Verdict{
			Reason: "task_backlog_stale", UserState: "temporary", Owner: "lifecycle", Next: "next sweep",
		},
		Mutation: "node.task_stale_sweep_interval_seconds is set to its upper bound: no sweep ends what expires within the " +
			"budget; the agent stays away as before",
		FailsAt: stage.Detected,
		Mutate:  rareSweeps,
		Run:     runBacklogStale,
	}
}

// rareSweeps puts the next sweep of tasks out of reach, as an operator could, and returns the function that puts it
// back. A replica waits for the present interval first, so lifecycle is started anew at the end.
func rareSweeps(ctx context.Context, r *kit.Run) (func(context.Context) error, error) {
	c, err := r.Mesh.Cluster()
	if err != nil {
		return nil, err
	}
	before, _ := r.Policy.Get(policy.TaskStaleSweepIntervalSeconds)
	key, _ := policy.Lookup(policy.TaskStaleSweepIntervalSeconds)
	back := func(ctx context.Context) error {
		return errors.Join(r.Mesh.SetPolicy(ctx, policy.TaskStaleSweepIntervalSeconds, before),
			r.Mesh.Restart(ctx, act.Lifecycle(c)))
	}
	return back, r.Mesh.SetPolicy(ctx, policy.TaskStaleSweepIntervalSeconds, key.Max)
}

func runBacklogStale(ctx context.Context, r *kit.Run) error {
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
	pid := held.Machine.PID()
	agent := host.Kernel(pid)
	b := &backlog{run: r, held: held}
	// It runs, unless the drill failed.
	defer r.Finally(ctx, func(ctx context.Context) { _ = m.StartMachine(ctx, held.Machine) })
	held.Machine.LetDie()
	if err := held.Machine.Kill9(); err != nil {
		return stage.At(stage.Good, err)
	}
	if err := b.ask(ctx); err != nil {
		return stage.At(stage.Good, err)
	}
	if err := await.Sleep(ctx, time.Until(b.over.Add(-probeEnd))); err != nil {
		return stage.At(stage.Good, err)
	}
	err = r.Inject(ctx, fmt.Sprintf("the agent of %s, process %d, away until %d tasks that were asked of it may not "+
		"start any more", held.Machine.Name(), pid, len(b.asked)),
		func(ctx context.Context) error { return await.Sleep(ctx, time.Until(b.over)) },
		func(context.Context) error {
			if left := time.Until(b.over); left > 0 {
				return fmt.Errorf("the tasks may start for %.1f s more", left.Seconds())
			}
			return host.Gone(pid, agent)
		})
	if err != nil {
		return err
	}
	if err := r.Detect(ctx, b.verdict); err != nil {
		return err
	}
	if err := r.Check(ctx); err != nil {
		return err
	}
	if err := mesh.Answers(ctx, held.URL); err != nil {
		return stage.At(stage.Verdict, err)
	}
	err = r.Recovered(ctx, "the node normal, the expired tasks history, and a new task completed", b.recovered)
	if err != nil {
		return err
	}
	if err := b.expired(ctx); err != nil {
		return stage.At(stage.Evidence, err)
	}
	r.Note("%d tasks stay expired, none was dispatched", len(b.asked))
	return r.Retire(ctx, held.ID)
}

// backlog is the tasks that are asked of a machine that is away.
type backlog struct {
	run     *kit.Run
	held    mesh.Held
	asked   []string  // ids of tasks
	over    time.Time // from then on none of them may start
	started bool      // the agent, again
	probe   string    // a task that was asked after its return
}

func (b *backlog) ask(ctx context.Context) error {
	for range probesAsked {
		resp, err := b.run.Mesh.Client.Command.ProbeNode(ctx, &readmodelv1.ProbeNodeRequest{Node: b.held.Node})
		if err != nil {
			return fmt.Errorf("ask for a probe: %w", err)
		}
		b.asked = append(b.asked, resp.GetTask().GetTaskId())
	}
	b.over = time.Now().Add(probeWindow)
	b.run.Evidence(b.asked...)
	return nil
}

// expired returns nil if all tasks have ended as expired and none was ever dispatched.
func (b *backlog) expired(ctx context.Context) error {
	tasks, err := act.TasksOf(ctx, b.run.Mesh, b.held.Node)
	if err != nil {
		return err
	}
	for _, id := range b.asked {
		if task := tasks[id]; task.GetState() != commonv1.TaskState_TASK_STATE_EXPIRED || task.GetAttempt() != 0 ||
			task.GetCurrent() {
			return fmt.Errorf("task %s is %s in attempt %d", id, names.Of(task.GetState()), task.GetAttempt())
		}
	}
	return nil
}

// verdict starts the agent once the tasks have expired, and reads the verdict on the node.
func (b *backlog) verdict(ctx context.Context) (kit.Verdict, error) {
	if !b.started {
		if err := b.expired(ctx); err != nil {
			return kit.Verdict{}, err
		}
		if err := b.held.Machine.Start(); err != nil {
			return kit.Verdict{}, stage.At(stage.Detected, err)
		}
		b.started = true
	}
	node, err := b.run.Mesh.Node(ctx, b.held.Node)
	v := kit.Verdict{Reason: node.GetReason(), UserState: names.Of(node.GetUserState()), Next: node.GetNextAction()}
	if err == nil && (!node.GetConnected() || v.Reason != b.run.Drill.Expect.Reason) {
		err = fmt.Errorf("the node is connected %t, %s to its user: %q", node.GetConnected(), v.UserState, v.Reason)
	}
	return v, err
}

// recovered returns nil once the node is normal and has completed a task since.
func (b *backlog) recovered(ctx context.Context) error {
	if err := act.Connected(ctx, b.run.Mesh, b.held.Node); err != nil {
		return err
	}
	if b.probe == "" {
		resp, err := b.run.Mesh.Client.Command.ProbeNode(ctx, &readmodelv1.ProbeNodeRequest{Node: b.held.Node})
		if err != nil {
			return err
		}
		b.probe = resp.GetTask().GetTaskId()
	}
	tasks, err := act.TasksOf(ctx, b.run.Mesh, b.held.Node)
	if err != nil {
		return err
	}
	if state := tasks[b.probe].GetState(); state != commonv1.TaskState_TASK_STATE_SUCCEEDED {
		return fmt.Errorf("task %s, asked after the return, is %s", b.probe, names.Of(state))
	}
	return nil
}
