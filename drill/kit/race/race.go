package race

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gpuaas/mesh/drill/kit"
	"github.com/gpuaas/mesh/drill/kit/await"
	"github.com/gpuaas/mesh/drill/kit/stage"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/mesh/person"
)

// racers ask at the same instant in each round.
const racers = 100

// ReasonJoined is the name, among explained reasons, of the API's mark on an operation that a request joined.
const ReasonJoined = "operation_joined"

// Race is what the races for one workspace carry from round to round.
type Race struct {
	r     *kit.Run
	id    string
	epoch int64
	ops   []string
	turns int

	askers []*person.Client // of different people, who send requests in turn
	flying atomic.Int64     // requests under way
}

// New returns a race for the recreation of the workspace that an operation created.
func New(r *kit.Run, created *lifecyclev1.Operation) *Race {
	return &Race{r: r, id: created.GetWorkspaceId(), epoch: created.GetEpoch()}
}

// start makes the requests of a race, and returns the operation.
type start func(ctx context.Context) (*lifecyclev1.Operation, error)

// Round is one race with its disturbance, from the first request until the next epoch serves.
func (x *Race) Round(ctx context.Context, what string, disturb func(context.Context, start) error) error {
	r := x.r
	asked := racers
	if r.Control == kit.Withheld {
		asked = 1 // one requester is no race
	}
	x.turns++
	r.FaultAt = time.Now()
	var served *lifecyclev1.Operation
	var seen kit.Verdict
	err := disturb(ctx, func(ctx context.Context) (*lifecyclev1.Operation, error) {
		op, joined, inFlight, err := x.ask(ctx, asked)
		if err != nil {
			return nil, err
		}
		if asked < racers || inFlight < racers/2 {
			return nil, stage.At(stage.Injected,
				fmt.Errorf("%s: %d requests were made, at most %d at once: that is no race of %d",
					what, asked, inFlight, racers))
		}
		r.Result.Injected = true
		r.Result.InjectedBy = fmt.Sprintf("%d requests, %d of them in flight at once, counted by the callers", asked,
			inFlight)
		took := time.Since(r.FaultAt)
		r.Result.DetectedSeconds = max(r.Result.DetectedSeconds, kit.Seconds(took))
		if budget := r.Result.DetectionBudgetSeconds; took.Seconds() > budget {
			return nil, stage.At(stage.Detected,
				fmt.Errorf("%s: all answers took %.1f s, longer than %.1f s", what, took.Seconds(),
					budget))
		}
		if op.GetEpoch() != x.epoch+1 {
			return nil, stage.At(stage.Detected,
				fmt.Errorf("%s: the operation is for epoch %d after epoch %d", what, op.GetEpoch(),
					x.epoch))
		}
		r.Note("%s: %d requests, %d at once, one operation %s after %.2f s", what, asked, inFlight, op.GetOperationId(),
			took.Seconds())
		seen = kit.Verdict{Reason: joined, UserState: x.userState(ctx)}
		served = op
		return op, nil
	})
	if err != nil {
		return stage.At(stage.Detected, err)
	}
	r.Evidence(served.GetOperationId())
	x.ops = append(x.ops, served.GetOperationId())
	r.Verdict = seen
	r.Result.Reason, r.Result.UserState = seen.Reason, seen.UserState
	if err := r.Check(ctx); err != nil {
		return err
	}
	longest := r.Result.RecoveredSeconds
	if err := r.Recovered(ctx, what+": the next epoch serves, and no other lives",
		func(ctx context.Context) error { return r.Mesh.Serving(ctx, x.id, x.epoch+1) }); err != nil {
		return err
	}
	r.Result.RecoveredSeconds = max(longest, r.Result.RecoveredSeconds)
	x.epoch++
	return nil
}

// ask makes n requests at the same instant, all for a recreation, and checks that all were answered with one operation
// that at most one of them began. It returns the operation, the reason "operation_joined" if the API reported of every
// other request that it joined, and how many were in flight at once.
func (x *Race) ask(ctx context.Context, n int) (*lifecyclev1.Operation, string, int64, error) {
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
			answers[i].op, answers[i].err = await.Answer(ctx, "recreate",
				func(ctx context.Context) (*lifecyclev1.Operation, error) {
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
			return nil, "", most.Load(), stage.At(stage.Detected, fmt.Errorf("a racer was refused: %w", a.err))
		}
		if op == nil {
			op = a.op
		}
		if a.op.GetOperationId() != op.GetOperationId() || a.op.GetEpoch() != op.GetEpoch() {
			return nil, "", most.Load(), stage.At(stage.Detected,
				fmt.Errorf("two operations: %s in epoch %d and %s in epoch %d", op.GetOperationId(), op.GetEpoch(),
					a.op.GetOperationId(), a.op.GetEpoch()))
		}
		if a.op.GetJoined() || a.op.GetReplayed() {
			joined++
		}
	}
	if joined < n-1 {
		return nil, "", most.Load(), stage.At(stage.Detected,
			fmt.Errorf("%d of %d racers were told that the operation is theirs", n-joined, n))
	}
	reason := ""
	if joined > 0 {
		reason = ReasonJoined
	}
	return op, reason, most.Load(), nil
}

// userState returns the state that the workspace's user sees while the operation is under way.
func (x *Race) userState(ctx context.Context) string {
	var state string
	// If the state was not seen, check fails.
	_ = await.Until(ctx, "the recreation to be seen", await.Patience, func(ctx context.Context) error {
		ws, err := x.r.Mesh.Workspace(ctx, x.id)
		state = names.Of(ws.GetUserState())
		if err == nil && ws.GetEpoch() <= x.epoch {
			err = fmt.Errorf("it is in epoch %d", ws.GetEpoch())
		}
		return err
	})
	return state
}

// Plain is a race without a disturbance.
func (x *Race) Plain(ctx context.Context) error {
	return x.Round(ctx, "plain", func(ctx context.Context, run start) error {
		_, err := run(ctx)
		return err
	})
}

// repeat races at most so many times, until a disturbance meets the race, and returns never if none did.
func (x *Race) repeat(ctx context.Context, times int, what string,
	disturb func(context.Context, start) (bool, error), never error,
) error {
	for range times {
		met := false
		err := x.Round(ctx, what, func(ctx context.Context, run start) error {
			var err error
			met, err = disturb(ctx, run)
			return err
		})
		if err != nil || met {
			return err
		}
	}
	return stage.At(stage.Injected, never)
}
