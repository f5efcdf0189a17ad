package drill

import (
	"context"

	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
)

// doubleProvision is row 27: all who may replace an instance do so at once.
func doubleProvision() Drill {
	return Drill{
		Name: "double-provision-race",
		Injects: "in each round a hundred requests, half of the workspace's user and half of an admin, ask at once for its recreation: alone, while the lock store is " +
			"flushed every few milliseconds, and in the moment in which the watchdog asks too, which misses the session of the instance that was killed: lifecycle is held " +
			"until all of them stand before it; then the replica that holds the run is stopped for longer than its lease",
		Sees:     "one operation for all, joined by all others; the workspace recovering",
		Recovers: "by itself: the next epoch alone is launched, once, when the former has ended; a holder that wakes after its lease is fenced out",
		Needs: "its own mesh for the lock store, the pause, the driver's ledger and the proof that two instances are found; through the API alone it races without " +
			"them",
		Outside: true,
		Expect:  Verdict{Reason: reasonJoined, UserState: "recovering", Owner: "lifecycle", Next: "wait"},
		Mutation: "after the races the end of the former epoch's instance is taken out of the driver's ledger, so that the placement lists two instances of the workspace. " +
			"The replicas of lifecycle are started anew for that with a finding_sweep of a second, and in the mutation of an hour: the two stand as before, and the sweep " +
			"that is to find them does not look",
		mutated: StageEvidence,
		run:     runRace,
	}
}

func runRace(ctx context.Context, r *Run) error {
	m := r.Mesh
	if err := r.observe(ctx); err != nil {
		return err
	}
	name := fresh("race")
	op, err := m.create(ctx, name, nil)
	if err != nil {
		return at(StageGood, err)
	}
	r.about(op.GetWorkspaceId())
	r.evidence(op.GetOperationId())
	defer r.leave(ctx, op.GetWorkspaceId())
	if err := await(ctx, "the workspace to serve", settle, func(ctx context.Context) error {
		return m.serving(ctx, op.GetWorkspaceId(), op.GetEpoch())
	}); err != nil {
		return at(StageGood, err)
	}
	x := newRace(r, op)
	if err := x.invite(ctx); err != nil {
		return at(StageGood, err)
	}
	defer x.dismiss()
	type round struct {
		what  string
		fault func(ctx context.Context, run func(ctx context.Context) (*lifecyclev1.Operation, error)) error
	}
	rounds := []round{{"plain", x.plain}}
	if m.Own() && r.Control == None { // the controls are about the race and its verifier, and need only one round
		rounds = append(rounds, round{"lock store flushed", x.flushed})
	}
	for _, next := range rounds {
		if err := x.round(ctx, next.what, next.fault); err != nil {
			return err
		}
	}
	if m.Own() && r.Control == None {
		if err := x.beside(ctx); err != nil {
			return err
		}
		if err := x.hold(ctx); err != nil {
			return err
		}
	}
	if err := x.judge(ctx); err != nil {
		return err
	}
	return r.retire(ctx, op.GetWorkspaceId())
}
