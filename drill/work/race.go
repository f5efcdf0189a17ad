package work

import (
	"context"

	"github.com/gpuaas/mesh/drill/kit"
	"github.com/gpuaas/mesh/drill/kit/mesh"
	"github.com/gpuaas/mesh/drill/kit/race"
	"github.com/gpuaas/mesh/drill/kit/stage"
)

// DoubleProvision is row 27: all who may replace an instance do so at once.
func DoubleProvision() kit.Drill {
	return kit.Drill{
		Name: "double-provision-race",
		Injects: "in each round a hundred requests, half of the workspace's user and half of an admin, ask at once for " +
			"its recreation: alone, while the lock store is " +
			"flushed every few milliseconds, and in the moment in which the watchdog asks too, which misses the session of " +
			"the instance that was killed: lifecycle is held " +
			"until all of them stand before it; then the replica that holds the run is stopped for longer than its lease",
		Sees: "one operation for all, joined by all others; the workspace recovering",
		Recovers: "by itself: the next epoch alone is launched, once, when the former has ended; a holder that wakes " +
			"after its lease is fenced out",
		Needs: "its own mesh for the lock store, the pause, the driver's launch log and the proof that two instances are " +
			"found; through the API alone it races without " +
			"them",
		Outside: true,
		Expect:  kit.Verdict{Reason: race.ReasonJoined, UserState: "recovering", Owner: "lifecycle", Next: "wait"},
		Mutation: "after the races the end of the former epoch's instance is taken out of the driver's launch log, so that " +
			"the placement lists two instances of the workspace. " +
			"The replicas of lifecycle are started anew for that with a finding_sweep of a second, and in the mutation of an " +
			"hour: the two stand as before, and the sweep " +
			"that is to find them does not look",
		FailsAt: stage.Evidence,
		Run:     runRace,
	}
}

func runRace(ctx context.Context, r *kit.Run) error {
	m := r.Mesh
	if err := r.Observe(ctx); err != nil {
		return err
	}
	name := mesh.FreshName("race")
	op, err := m.Create(ctx, name, nil)
	if err != nil {
		return stage.At(stage.Good, err)
	}
	r.About(op.GetWorkspaceId())
	r.Evidence(op.GetOperationId())
	defer r.Leave(ctx, op.GetWorkspaceId())
	if err := m.AwaitServing(ctx, op.GetWorkspaceId(), op.GetEpoch()); err != nil {
		return stage.At(stage.Good, err)
	}
	x := race.New(r, op)
	if err := x.Invite(ctx); err != nil {
		return stage.At(stage.Good, err)
	}
	defer x.Dismiss()
	races := []func(context.Context) error{x.Plain}
	if m.Own() && r.Control == kit.None { // the controls are about the race and its verifier, and need only one round
		races = append(races, x.Flush, x.Beside, x.Pause)
	}
	for _, run := range append(races, x.Check) {
		if err := run(ctx); err != nil {
			return err
		}
	}
	return r.Retire(ctx, op.GetWorkspaceId())
}
