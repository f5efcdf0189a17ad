package drill

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"syscall"
	"time"

	"github.com/gpuaas/mesh/drill/kit"
	"github.com/gpuaas/mesh/drill/kit/await"
	"github.com/gpuaas/mesh/drill/kit/host"
	"github.com/gpuaas/mesh/drill/kit/mesh"
	"github.com/gpuaas/mesh/drill/kit/stage"
	"github.com/gpuaas/mesh/internal/names"
)

// clockSkew is row 26: the clock of a machine jumps by a day, forward and back.
func clockSkew() kit.Drill {
	return kit.Drill{
		Name: "clock-skew",
		Injects: "the clock of a machine that serves a workspace jumps a day ahead while its agent runs; and once more, " +
			"a day back: the agent reads its clock with an offset from a file, which is replaced",
		Sees: "`clock_skew`, the node wants an operator; the agent stays connected and the workload serves",
		Recovers: "by setting the clock right: no enrolment, the same instance and serial (or one renewed by the stream), " +
			"whichever way the clock was off",
		Needs:  "its own mesh: a machine whose agent reads an offset for its clock",
		Expect: kit.Verdict{Reason: "clock_skew", UserState: "operator_action_required", Owner: "host", Next: "clock"},
		Mutation: "the replicas of recovery, which judge, are stopped before the clock jumps: nodeapi reports the clock as " +
			"before, and no verdict is concluded",
		FailsAt: stage.Detected,
		Scale:   10, // heartbeats come every few seconds in either form
		Run:     runClockSkew,
	}
}

func runClockSkew(ctx context.Context, r *kit.Run) error {
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
	offset := filepath.Join(held.Dir, "clock-offset")
	if err := host.SetOffset(offset, 0); err != nil {
		return stage.At(stage.Good, err)
	}
	if err := restartMachine(ctx, m, held, "GPUAAS_CLOCK_OFFSET=@"+offset); err != nil {
		return stage.At(stage.Good, err)
	}
	defer restoreMachine(ctx, r, held)
	offsets := []time.Duration{24 * time.Hour, -24 * time.Hour}
	if r.Control != kit.None {
		offsets = offsets[:1] // both begin alike
	}
	if r.Control == kit.Mutated {
		defer signal(c.Recovery, syscall.SIGCONT)
		signal(c.Recovery, syscall.SIGSTOP)
	}
	for _, by := range offsets {
		if err := skewedBy(ctx, r, held, offset, by); err != nil {
			return err
		}
	}
	return r.Retire(ctx, held.ID)
}

// skewedBy is the drill with one offset.
func skewedBy(ctx context.Context, r *kit.Run, held mesh.Held, file string, by time.Duration) error {
	m := r.Mesh
	before, err := m.Node(ctx, held.Node)
	if err != nil {
		return stage.At(stage.Good, err)
	}
	pid := held.Machine.PID()
	agent := host.Kernel(pid)
	err = r.Inject(ctx, fmt.Sprintf("the clock of %s, process %d, %s off: %s contains that, and the process's "+
		"environment names the file", held.Machine.Name(), pid, by, file),
		func(context.Context) error { return host.SetOffset(file, by) },
		func(context.Context) error { return host.ReadsOffset(pid, file, by) })
	if err != nil {
		return err
	}
	err = r.Detect(ctx, verdictOf(m, held.Node, r.Drill.Expect.Reason))
	if err != nil {
		return err
	}
	if err := r.Check(ctx); err != nil {
		return err
	}
	now, err := m.Node(ctx, held.Node)
	if err == nil && !now.GetConnected() {
		err = errors.New("the node is not connected")
	}
	if err == nil {
		err = mesh.Answers(ctx, held.URL)
	}
	if err != nil {
		return stage.At(stage.Verdict, fmt.Errorf("while the clock is off: %w", err))
	}
	if err := host.SetOffset(file, 0); err != nil {
		return stage.At(stage.Recover, err)
	}
	err = r.Recovered(ctx, "the node normal and connected, its workspace serves", func(ctx context.Context) error {
		if err := connected(ctx, m, held.Node); err != nil {
			return err
		}
		return mesh.Answers(ctx, held.URL)
	})
	if err != nil {
		return err
	}
	if host.Gone(pid, agent) == nil {
		return stage.At(stage.Evidence, errors.New("the agent has ended"))
	}
	return stage.At(stage.Evidence, sameInstance(ctx, m, held.Node, before.GetIdentity().GetNodeInstanceId(),
		before.GetIdentity().GetMints()))
}

// verdictOf returns what reads the verdict on a node until it has the given reason.
func verdictOf(m *mesh.Mesh, node, reason string) func(context.Context) (kit.Verdict, error) {
	return func(ctx context.Context) (kit.Verdict, error) {
		n, err := m.Node(ctx, node)
		v := kit.Verdict{Reason: n.GetReason(), UserState: names.Of(n.GetUserState()), Next: n.GetNextAction()}
		if err == nil && v.Reason != reason {
			err = fmt.Errorf("the node is connected %t, %s to its user: %q", n.GetConnected(), v.UserState, v.Reason)
		}
		return v, err
	}
}

// sameInstance checks that a node was not enrolled again.
func sameInstance(ctx context.Context, m *mesh.Mesh, node, instance string, mints int32) error {
	now, err := m.Node(ctx, node)
	id := now.GetIdentity()
	if err == nil && (id.GetNodeInstanceId() != instance || id.GetMints() != mints) {
		err = fmt.Errorf("the node is instance %s after %d enrolments, was %s after %d", id.GetNodeInstanceId(),
			id.GetMints(), instance, mints)
	}
	return err
}

// restartMachine starts a machine's agent anew with an environment and arguments of the drill's, and waits until the
// node is normal.
func restartMachine(ctx context.Context, m *mesh.Mesh, held mesh.Held, env string, args ...string) error {
	if err := held.Machine.Stop(ctx); err != nil {
		return err
	}
	held.Machine.SetEnv(env)
	held.Machine.SetArgs(args...)
	if err := m.StartMachine(ctx, held.Machine); err != nil {
		return err
	}
	return await.Until(ctx, held.Machine.Name()+" to be normal", await.Settle,
		func(ctx context.Context) error { return connected(ctx, m, held.Node) })
}

// restoreMachine starts a machine's agent anew as it was before the drill, and waits until its node is normal: facts
// that are as they were are another change of them, of which the next drill would be accused.
func restoreMachine(ctx context.Context, r *kit.Run, held mesh.Held) {
	r.Finally(ctx, func(ctx context.Context) {
		err := errors.Join(held.Machine.Stop(ctx), r.Mesh.StartMachine(ctx, held.Machine))
		if err == nil {
			err = await.Until(ctx, held.Machine.Name()+" to be normal again", await.Patience,
				func(ctx context.Context) error { return connected(ctx, r.Mesh, held.Node) })
		}
		r.Left("the machine", err)
	})
}
