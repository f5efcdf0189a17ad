package hosts

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"github.com/gpuaas/mesh/drill/kit"
	"github.com/gpuaas/mesh/drill/kit/act"
	"github.com/gpuaas/mesh/drill/kit/host"
	"github.com/gpuaas/mesh/drill/kit/mesh"
	"github.com/gpuaas/mesh/drill/kit/stage"
)

// ClockSkew is row 26: the clock of a machine jumps by a day, forward and back.
func ClockSkew() kit.Drill {
	return kit.Drill{
		Name: "clock-skew",
		Injects: "the clock of a machine that serves a workspace jumps a day ahead while its agent runs; and once more, " +
			"a day back: the agent reads its clock with an offset from a file, which is replaced",
		Sees: "`clock_skew`, the node wants an operator; the agent stays connected and the workload serves",
		Recovers: "by setting the clock right: no enrolment, the same instance and serial (or one renewed by the stream), " +
			"whichever way the clock was off",
		Needs:  "its own mesh: a machine whose agent reads an offset for its clock",
		Expect: kit.Verdict{Reason: "clock_skew", UserState: "operator_action_required", Owner: "host", Next: "clock"},
		Mutation: "the replicas of nodeapi are started anew with a clock_tolerance of two days: they measure the clock as " +
			"before, and report no difference of one; the clock jumps as before",
		FailsAt: stage.Detected,
		Mutate:  act.Restarted(act.NodeAPI, "GPUAAS_NODEAPI_CLOCK_TOLERANCE=48h"),
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
	if err := act.RestartMachine(ctx, m, held, "GPUAAS_CLOCK_OFFSET=@"+offset); err != nil {
		return stage.At(stage.Good, err)
	}
	defer act.RestoreMachine(ctx, r, held)
	offsets := []time.Duration{24 * time.Hour, -24 * time.Hour}
	if r.Control != kit.None {
		offsets = offsets[:1] // both begin alike
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
	err = r.Detect(ctx, act.VerdictOf(m, held.Node, r.Drill.Expect.Reason))
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
		if err := act.Connected(ctx, m, held.Node); err != nil {
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
	return stage.At(stage.Evidence, act.SameInstance(ctx, m, held.Node, before.GetIdentity().GetNodeInstanceId(),
		before.GetIdentity().GetMints()))
}
