package drill

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/redis/go-redis/v9"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/mesh/cluster"
	"github.com/gpuaas/mesh/mesh/person"
)

// racers ask at the same instant in each round.
const racers = 100

// reasonJoined is the name, among explained reasons, of the API's mark on an operation that a request joined.
const reasonJoined = "operation_joined"

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

// race is the state that one drill carries from round to round.
type race struct {
	r     *Run
	id    string
	epoch int64
	ops   []string
	turns int

	askers []*person.Client // of different people, who send requests in turn
	flying atomic.Int64     // requests under way
}

// newRace returns a race for the recreation of the workspace that an operation created.
func newRace(r *Run, created *lifecyclev1.Operation) *race {
	return &race{r: r, id: created.GetWorkspaceId(), epoch: created.GetEpoch()}
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

// round is one race with its disturbance, from the first request until the next epoch serves.
func (x *race) round(ctx context.Context, what string,
	disturb func(context.Context, func(context.Context) (*lifecyclev1.Operation, error)) error,
) error {
	r := x.r
	asked := racers
	if r.Control == Withheld {
		asked = 1 // one requester is no race
	}
	x.turns++
	r.faultAt = time.Now()
	var served *lifecyclev1.Operation
	var seen Verdict
	err := disturb(ctx, func(ctx context.Context) (*lifecyclev1.Operation, error) {
		op, joined, inFlight, err := x.ask(ctx, asked)
		if err != nil {
			return nil, err
		}
		if asked < racers || inFlight < racers/2 {
			return nil, at(StageInjected, fmt.Errorf("%s: %d requests were made, at most %d at once: that is no race of %d",
				what, asked, inFlight, racers))
		}
		r.result.Injected = true
		r.result.InjectedBy = fmt.Sprintf("%d requests, %d of them in flight at once, counted by the callers", asked,
			inFlight)
		took := time.Since(r.faultAt)
		r.result.DetectedSeconds = max(r.result.DetectedSeconds, round(took))
		if budget := r.result.DetectionBudgetSeconds; took.Seconds() > budget {
			return nil, at(StageDetected, fmt.Errorf("%s: all answers took %.1f s, longer than %.1f s", what, took.Seconds(),
				budget))
		}
		if op.GetEpoch() != x.epoch+1 {
			return nil, at(StageDetected, fmt.Errorf("%s: the operation is for epoch %d after epoch %d", what, op.GetEpoch(),
				x.epoch))
		}
		r.note("%s: %d requests, %d at once, one operation %s after %.2f s", what, asked, inFlight, op.GetOperationId(),
			took.Seconds())
		seen = Verdict{Reason: joined, UserState: x.userState(ctx)}
		served = op
		return op, nil
	})
	if err != nil {
		return at(StageDetected, err)
	}
	r.evidence(served.GetOperationId())
	x.ops = append(x.ops, served.GetOperationId())
	r.verdict = seen
	r.result.Reason, r.result.UserState = seen.Reason, seen.UserState
	if err := r.check(ctx); err != nil {
		return err
	}
	longest := r.result.RecoveredSeconds
	if err := r.recovered(ctx, what+": the next epoch serves, and no other lives",
		func(ctx context.Context) error { return r.Mesh.serving(ctx, x.id, x.epoch+1) }); err != nil {
		return err
	}
	r.result.RecoveredSeconds = max(longest, r.result.RecoveredSeconds)
	x.epoch++
	return nil
}

// ask makes n requests at the same instant, all for a recreation, and checks that all were answered with one operation
// that at most one of them began. It returns the operation, the reason "operation_joined" if the API reported of every
// other request that it joined, and how many were in flight at once.
func (x *race) ask(ctx context.Context, n int) (*lifecyclev1.Operation, string, int64, error) {
	type answer struct {
		op  *lifecyclev1.Operation
		err error
	}
	answers := make([]answer, n)
	begin := make(chan struct{})
	var wg sync.WaitGroup
	var most atomic.Int64
	for i := range n {
		wg.Go(func() {
			<-begin
			now := x.flying.Add(1)
			for old := most.Load(); now > old && !most.CompareAndSwap(old, now); old = most.Load() {
			}
			defer x.flying.Add(-1)
			asker := x.askers[i%len(x.askers)]
			key := ids.New()
			answers[i].op, answers[i].err = command(ctx, "recreate", func(ctx context.Context) (*lifecyclev1.Operation, error) {
				resp, err := asker.Command.OperateWorkspace(ctx, &readmodelv1.OperateWorkspaceRequest{
					Workspace: x.id, Kind: commonv1.OperationKind_OPERATION_KIND_RECREATE, Reason: "drill", IdempotencyKey: key,
				})
				return resp.GetOperation(), err
			})
		})
	}
	close(begin)
	wg.Wait()
	joined := 0
	var op *lifecyclev1.Operation
	for _, a := range answers {
		if a.err != nil {
			return nil, "", most.Load(), at(StageDetected, fmt.Errorf("a racer was refused: %w", a.err))
		}
		if op == nil {
			op = a.op
		}
		if a.op.GetOperationId() != op.GetOperationId() || a.op.GetEpoch() != op.GetEpoch() {
			return nil, "", most.Load(), at(StageDetected,
				fmt.Errorf("two operations: %s in epoch %d and %s in epoch %d", op.GetOperationId(), op.GetEpoch(),
					a.op.GetOperationId(), a.op.GetEpoch()))
		}
		if a.op.GetJoined() || a.op.GetReplayed() {
			joined++
		}
	}
	if joined < n-1 {
		return nil, "", most.Load(), at(StageDetected,
			fmt.Errorf("%d of %d racers were told that the operation is theirs", n-joined, n))
	}
	reason := ""
	if joined > 0 {
		reason = reasonJoined
	}
	return op, reason, most.Load(), nil
}

// userState returns the state that the workspace's user sees while the operation is under way.
func (x *race) userState(ctx context.Context) string {
	var state string
	// If the state was not seen, check fails.
	_ = await(ctx, "the recreation to be seen", patience, func(ctx context.Context) error {
		ws, err := x.r.Mesh.workspace(ctx, x.id)
		state = names.Of(ws.GetUserState())
		if err == nil && ws.GetEpoch() <= x.epoch {
			err = fmt.Errorf("it is in epoch %d", ws.GetEpoch())
		}
		return err
	})
	return state
}

// plain is a race without a disturbance.
func (x *race) plain(ctx context.Context, run func(context.Context) (*lifecyclev1.Operation, error)) error {
	_, err := run(ctx)
	return err
}

// flushed flushes the lock store every few milliseconds while the race goes on. The store's own counter is the
// evidence; an imitation has none, and there the confirmed commands are counted.
func (x *race) flushed(ctx context.Context, run func(context.Context) (*lifecyclev1.Operation, error)) error {
	c, err := x.r.Mesh.own()
	if err != nil {
		return err
	}
	options, err := redis.ParseURL(c.Stores.Redis.URL())
	if err != nil {
		return err
	}
	store := redis.NewClient(options)
	defer store.Close() //nolint:errcheck // nothing is lost with it
	before := 0
	if c.Stores.Redis.Real() {
		if before, err = flushes(ctx, store); err != nil {
			return at(StageGood, err)
		}
	}
	confirmed := 0
	flushing, stop := context.WithCancel(ctx)
	var wg sync.WaitGroup
	wg.Go(func() {
		for wait(flushing, 5*time.Millisecond) == nil {
			if store.FlushAll(flushing).Err() == nil {
				confirmed++
			}
		}
	})
	_, err = run(ctx)
	stop()
	wg.Wait()
	if err != nil {
		return err
	}
	after := confirmed
	if c.Stores.Redis.Real() {
		after, err = flushes(ctx, store)
	}
	if err == nil && after <= before {
		err = errors.New("the lock store was not flushed once")
	}
	if err == nil {
		x.r.note("the lock store, a %s, was flushed %d times during the race", c.Stores.RedisKind(), after-before)
	}
	return at(StageInjected, err)
}

// flushes returns how often a store was flushed, by its own counter.
func flushes(ctx context.Context, store *redis.Client) (int, error) {
	info, err := store.Info(ctx, "commandstats").Result()
	if err != nil {
		return 0, fmt.Errorf("ask the lock store: %w", err)
	}
	for text := range strings.Lines(info) {
		if rest, ok := strings.CutPrefix(text, "cmdstat_flushall:calls="); ok {
			count, _, _ := strings.Cut(rest, ",")
			return strconv.Atoi(count)
		}
	}
	return 0, nil
}

// holds is how often the drill tries to stop a holder: a run is parked most of the time, and a parked run loses nothing
// when its last holder stops.
const holds = 20

// hold races until a replica that had leased the run was stopped for longer than the lease, and another continued the
// run meanwhile.
func (x *race) hold(ctx context.Context) error {
	for range holds {
		lost := false
		err := x.round(ctx, "holder paused past its lease",
			func(ctx context.Context, run func(context.Context) (*lifecyclev1.Operation, error)) error {
				var err error
				lost, err = x.paused(ctx, run)
				return err
			})
		if err != nil || lost {
			return err
		}
	}
	return at(StageInjected, fmt.Errorf("in %d rounds no run was held by the replica that was stopped", holds))
}

// paused stops the replica that has leased the run for longer than the run's lease, and reports whether the run's
// attempt was lost by that: another replica took the run over, as the timeline records. The kernel confirms that the
// holder was stopped the whole time.
func (x *race) paused(ctx context.Context, run func(context.Context) (*lifecyclev1.Operation, error)) (bool, error) {
	c, err := x.r.Mesh.own()
	if err != nil {
		return false, err
	}
	op, err := run(ctx)
	if err != nil {
		return false, err
	}
	holder, err := x.holder(ctx, c, op)
	if err != nil || holder == nil {
		return false, at(StageInjected, err)
	}
	pid := holder.PID()
	if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
		return false, at(StageInjected, err)
	}
	err = errors.Join(await(ctx, "the holder to stop", took, func(context.Context) error { return stopped(pid) }),
		wait(ctx, x.pause()), stopped(pid))
	if err = errors.Join(err, syscall.Kill(pid, syscall.SIGCONT)); err != nil {
		return false, at(StageInjected, err)
	}
	resp, err := x.r.Mesh.Client.Query.GetTimeline(ctx, &readmodelv1.GetTimelineRequest{Workspace: x.id})
	if err != nil {
		return false, at(StageInjected, err)
	}
	for _, i := range resp.GetItems() {
		if i.GetRunId() == op.GetOperationId() && i.GetState() == commonv1.AttemptState_ATTEMPT_STATE_LOST {
			x.r.note("%s, process %d, was stopped for %s in %q, which another replica took over", holder.Name, pid, x.pause(),
				i.GetName())
			return true, nil
		}
	}
	x.r.note("%s, process %d, was stopped for %s and held nothing by then", holder.Name, pid, x.pause())
	return false, nil
}

// pause returns a duration longer than a lease.
func (x *race) pause() time.Duration {
	if x.r.Mesh.Scaled {
		return scaledLease + 2*time.Second
	}
	return 20 * time.Second
}

// holder returns the replica that has leased a run, while it has; nil: no replica had leased it while the drill
// watched.
func (x *race) holder(ctx context.Context, c *cluster.Cluster, op *lifecyclev1.Operation) (*cluster.Process, error) {
	for began := time.Now(); time.Since(began) < time.Second; {
		resp, err := x.r.Mesh.Client.Query.GetTimeline(ctx, &readmodelv1.GetTimelineRequest{Workspace: x.id})
		if err != nil {
			return nil, err
		}
		for _, run := range resp.GetRuns() {
			i := slices.IndexFunc(c.Lifecycle, func(p *cluster.Process) bool { return p.Replica() == run.GetOwner() })
			if run.GetRunId() == op.GetOperationId() && i >= 0 {
				return c.Lifecycle[i], nil
			}
		}
	}
	return nil, nil
}

// judge checks the driver's launch log, one launch for each epoch, never two alive and as many epochs as there were
// operations, and then asks the API for a finding on two instances, which the product's own detector makes.
func (x *race) judge(ctx context.Context) error {
	r := x.r
	if !r.Mesh.Own() {
		if r.Control == Mutated {
			return errNotOwn
		}
		return x.judgeInstances(ctx)
	}
	ledger, err := r.Mesh.ledger()
	if err != nil {
		return at(StageEvidence, err)
	}
	n, live, err := launches(ledger, x.id)
	if err == nil && (n != x.turns+1 || live != x.epoch) {
		err = fmt.Errorf("%d launches for a create and %d recreations; epoch %d lives, not %d", n, x.turns, live, x.epoch)
	}
	if err != nil {
		return at(StageEvidence, err)
	}
	r.note("the driver's ledger has %d launches for %d epochs, one each, and never two alive", n, x.epoch)
	return x.detects(ctx)
}

// judgeInstances checks the instances that the API lists, where the launch log is out of reach.
func (x *race) judgeInstances(ctx context.Context) error {
	resp, err := x.r.Mesh.Client.Query.ListInstances(ctx,
		&readmodelv1.ListInstancesRequest{PageSize: 500, WorkspaceId: x.id})
	if err != nil {
		return at(StageEvidence, err)
	}
	items := resp.GetItems()
	perEpoch, live := map[int64]int{}, 0
	for _, i := range items {
		perEpoch[i.GetEpoch()]++
		x.r.evidence(i.GetInstanceId())
		if i.GetEndedAt() == nil {
			live++
		}
	}
	f, err := x.twoInstances(ctx)
	if err != nil || f != nil {
		return at(StageEvidence, errors.Join(err, openTwo(f)))
	}
	if live != 1 || len(perEpoch) != x.turns+1 || len(items) != len(perEpoch) {
		return at(StageEvidence, fmt.Errorf("%d instances of %d epochs, %d live, after a create and %d recreations",
			len(items), len(perEpoch), live, x.turns))
	}
	return nil
}
