package saga_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/claims"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
	"github.com/gpuaas/mesh/services/lifecycle/saga/sagatest"
)

func TestRetainKeepsClaimsAndRetryAdoptsThem(t *testing.T) {
	testkit.IO(t)
	var made atomic.Int32
	var flip atomic.Bool
	steps := sagatest.PureSteps("make", "flip")
	steps[0].Class = saga.Create
	steps[0].Kinds = []string{"instance"}
	steps[0].Do = func(ctx context.Context, env *saga.Env) (saga.Outcome, error) {
		claim, _, err := env.Intent(ctx, claims.Spec{Kind: "instance", Name: fmt.Sprintf("box-%d", env.Epoch)})
		if err != nil {
			return saga.Outcome{}, err
		}
		made.Add(1)
		return saga.Done(nil, func(ctx context.Context, tx pgx.Tx) error { return env.ConfirmTx(ctx, tx, claim, "box") }), nil
	}
	steps[0].Observe = func(ctx context.Context, env *saga.Env) (saga.Observation, error) {
		claims, err := env.Claims(ctx, "instance")
		if err != nil || len(claims) == 0 {
			return saga.Observation{Presence: saga.Absent}, err
		}
		return saga.Observation{Presence: saga.Present, Output: map[string]string{"ref": claims[0].ExternalRef}}, nil
	}
	steps[0].Undo = func(ctx context.Context, env *saga.Env) (saga.Outcome, error) {
		t.Error("a retained resource was undone")
		return saga.Done(nil), nil
	}
	steps[1].Retain = true
	steps[1].Do = func(context.Context, *saga.Env) (saga.Outcome, error) {
		if !flip.Load() {
			return saga.Outcome{}, sagatest.ErrBoom
		}
		return saga.Done(nil), nil
	}
	b := sagatest.NewBed(t, saga.Definition{Name: "toy", Version: 1, Steps: steps, States: sagatest.States()})
	b.Drive(b.Config("a"))
	ws, id := b.Create("toy")
	b.Await(id, testkit.Patience, "failed")
	retry := func(override bool, reason string) (saga.Retried, error) {
		var out saga.Retried
		err := b.Tx(func(ctx context.Context, tx pgx.Tx) error {
			var err error
			out, err = b.Core.Retry(ctx, tx,
				saga.RetryRequest{WorkspaceID: ws, Definition: "toy", Requester: "test", Override: override, Reason: reason})
			return err
		})
		return out, err
	}
	reset := func() {
		t.Helper()
		if err := b.Tx(
			func(ctx context.Context, tx pgx.Tx) error { _, _, err := b.Core.Reset(ctx, tx, ws); return err },
		); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := retry(false, ""); fault.ReasonOf(err) != commonv1.Reason_REASON_NOT_RESET {
		t.Errorf("retry before reset = %v", err)
	}
	for n := 1; n <= 3; n++ {
		reset()
		out, err := retry(false, "")
		if err != nil || out.Epoch != 1 || out.Used != n {
			t.Fatalf("retry %d = %+v, %v", n, out, err)
		}
		if n > 1 && !strings.Contains(out.Advice, "decommission") {
			t.Errorf("advice after the same failure twice = %q", out.Advice)
		}
		r := b.Await(out.RunID, testkit.Patience, "failed")
		if r.Round != n+1 || r.ParentRunID == "" {
			t.Errorf("round = %d, parent %q", r.Round, r.ParentRunID)
		}
	}
	reset()
	if _, err := retry(false, ""); fault.ReasonOf(err) != commonv1.Reason_REASON_RETRY_LIMIT_REACHED {
		t.Errorf("fourth retry = %v", err)
	}
	if _, err := retry(true, ""); fault.ReasonOf(err) != commonv1.Reason_REASON_REASON_REQUIRED {
		t.Errorf("override without reason = %v", err)
	}
	flip.Store(true)
	out, err := retry(true, "the disk is mended")
	if err != nil {
		t.Fatal(err)
	}
	b.Await(out.RunID, testkit.Patience, "succeeded")
	if made.Load() != 1 {
		t.Errorf("the resource was made %d times", made.Load())
	}
}

func TestUndoExhaustedIsStuckAndHelped(t *testing.T) {
	testkit.IO(t)
	for _, help := range []string{"retry", "skip", "close"} {
		t.Run(help, func(t *testing.T) {
			var rec sagatest.Record
			var mended atomic.Bool
			steps := sagatest.Recorded(&rec, "one", "two", "three")
			steps[2].Do = func(context.Context, *saga.Env) (saga.Outcome, error) {
				return saga.Outcome{}, saga.Fail(0, commonv1.Reason_REASON_WORKLOAD_FAILED, "", nil)
			}
			steps[1].Kinds = []string{"storage"}
			steps[1].Do = func(ctx context.Context, env *saga.Env) (saga.Outcome, error) {
				_, _, err := env.Intent(ctx, claims.Spec{Kind: "storage", Name: "disk"})
				return saga.Done(nil), err
			}
			steps[1].Undo = func(ctx context.Context, env *saga.Env) (saga.Outcome, error) {
				if !mended.Load() {
					return saga.Outcome{}, saga.Fail(commonv1.OwnerLayer_OWNER_LAYER_RUNTIME, commonv1.Reason_REASON_STORAGE_FAILED,
						"disk will not go", sagatest.ErrBoom)
				}
				claims, err := env.Claims(ctx, "storage")
				if err != nil {
					return saga.Outcome{}, err
				}
				return saga.Done(nil, func(ctx context.Context, tx pgx.Tx) error { return env.ReleaseTx(ctx, tx, claims[0]) }), nil
			}
			b := sagatest.NewBed(t, saga.Definition{Name: "toy", Version: 1, Steps: steps, States: sagatest.States()})
			b.Drive(b.Config("a"))
			ws, id := b.Create("toy")
			r := b.Await(id, testkit.Patience, "stuck")
			if !strings.Contains(r.StuckReason, "disk will not go") || r.WhyWaiting == "" || b.Workspace(ws).State != "stuck" {
				t.Errorf("stuck = %q, why %q, workspace %s", r.StuckReason, r.WhyWaiting, b.Workspace(ws).State)
			}
			// It still owns its workspace.
			err := b.Tx(func(ctx context.Context, tx pgx.Tx) error {
				_, err := b.Core.Start(ctx, tx,
					saga.StartRequest{WorkspaceID: ws, Kind: commonv1.OperationKind_OPERATION_KIND_RECREATE, Definition: "toy"})
				return err
			})
			if fault.ReasonOf(err) != commonv1.Reason_REASON_RUN_STUCK {
				t.Errorf("start on a stuck workspace = %v", err)
			}
			mended.Store(help == "retry")
			err = b.Tx(func(ctx context.Context, tx pgx.Tx) error {
				switch help {
				case "retry":
					_, err := b.Core.RetryUndo(ctx, tx, id, "op")
					return err
				case "skip":
					_, orphans, err := b.Core.SkipUndo(ctx, tx, id, "op", "the host burned")
					if err == nil && (len(orphans) != 1 || orphans[0].OrphanedBy != "op" || orphans[0].OrphanReason == "") {
						t.Errorf("orphans = %+v", orphans)
					}
					return err
				default:
					_, err := b.Core.CloseStuck(ctx, tx, id)
					return err
				}
			})
			if err != nil {
				t.Fatal(err)
			}
			b.Await(id, testkit.Patience, "failed")
			claims, err := claims.Live(t.Context(), b.DB.Pool(pg.RoleLifecycle), ws)
			if err != nil || (len(claims) > 0) != (help == "close") {
				t.Errorf("live claims = %+v, %v", claims, err)
			}
			if undone := slices.Contains(rec.All(), "undo one"); undone != (help != "close") {
				t.Errorf("calls after help = %v", rec.All())
			}
		})
	}
}

func TestHundredStartsMakeOneRun(t *testing.T) {
	testkit.IO(t)
	b := sagatest.NewBed(t, saga.Definition{
		Name: "toy", Version: 1, Steps: sagatest.PureSteps("one"), States: sagatest.States(),
	})
	ws, first := b.Create("toy")
	cfg := b.Config("a")
	stop := b.Drive(cfg)
	b.Await(first, testkit.Patience, "succeeded")
	stop()
	var joined, started atomic.Int32
	var runs sync.Map
	var wg sync.WaitGroup
	for range 100 {
		wg.Go(func() {
			err := pg.InTx(t.Context(), b.DB.Pool(pg.RoleLifecycle), func(ctx context.Context, tx pgx.Tx) error {
				out, err := b.Core.Start(ctx, tx, saga.StartRequest{
					WorkspaceID: ws, Kind: commonv1.OperationKind_OPERATION_KIND_RECREATE, Definition: "toy", NextEpoch: true,
				})
				if err != nil {
					return err
				}
				if out.Joined {
					joined.Add(1)
				} else {
					started.Add(1)
				}
				runs.Store(out.RunID, true)
				return nil
			})
			if err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	n := 0
	runs.Range(func(any, any) bool { n++; return true })
	if started.Load() != 1 || joined.Load() != 99 || n != 1 {
		t.Errorf("started %d, joined %d, runs %d", started.Load(), joined.Load(), n)
	}
	if w := b.Workspace(ws); w.Epoch != 2 {
		t.Errorf("epoch = %d after one recreation", w.Epoch)
	}
}

func TestOtherKindIsRefusedWithItsID(t *testing.T) {
	testkit.IO(t)
	b := sagatest.NewBed(t, saga.Definition{
		Name: "toy", Version: 1, Steps: sagatest.PureSteps("one"), States: sagatest.States(),
	})
	ws, id := b.Create("toy")
	err := b.Tx(func(ctx context.Context, tx pgx.Tx) error {
		_, err := b.Core.Start(ctx, tx,
			saga.StartRequest{WorkspaceID: ws, Kind: commonv1.OperationKind_OPERATION_KIND_DECOMMISSION, Definition: "toy"})
		return err
	})
	f, ok := fault.As(err)
	if !ok || f.Reason != commonv1.Reason_REASON_OPERATION_IN_PROGRESS || f.ConflictingID != id {
		t.Errorf("another kind = %v", err)
	}
	err = b.Tx(func(ctx context.Context, tx pgx.Tx) error { _, _, err := b.Core.Reset(ctx, tx, ws); return err })
	if f, ok := fault.As(err); !ok || f.RetryAfter != saga.ResetAdvice || len(f.Unmet) == 0 || f.ConflictingID != id {
		t.Errorf("reset while a run lives = %v", err)
	}
}

func TestWaitAndWake(t *testing.T) {
	testkit.IO(t)
	var calls atomic.Int32
	var attempts sagatest.Record
	steps := sagatest.PureSteps("wait")
	steps[0].Do = func(_ context.Context, env *saga.Env) (saga.Outcome, error) {
		attempts.Add("%d/%d", env.Attempt, env.OpSeq)
		if calls.Add(1) == 1 {
			return saga.Wait(saga.WaitFor{For: time.Hour, Why: "pods 0/3", WakeOnSignal: true}), nil
		}
		return saga.Done(nil), nil
	}
	b := sagatest.NewBed(t, saga.Definition{Name: "toy", Version: 1, Steps: steps, States: sagatest.States()})
	b.Drive(b.Config("a"))
	_, id := b.Create("toy")
	r := b.Await(id, testkit.Patience, "waiting")
	if r.Owner != "" || r.WhyWaiting != "pods 0/3" {
		t.Errorf("parked run: owner %q, why %q", r.Owner, r.WhyWaiting)
	}
	if err := b.Tx(func(ctx context.Context, tx pgx.Tx) error { return b.Core.Wake(ctx, tx, id) }); err != nil {
		t.Fatal(err)
	}
	b.Await(id, testkit.Patience, "succeeded")
	if got := attempts.All(); !slices.Equal(got, []string{"1/1", "1/1"}) {
		t.Errorf("calls (attempt/op_seq) = %v: a wait keeps its attempt", got)
	}
}

// TestWakeIsNeverLost signals while the step is between its check and its park.
func TestWakeIsNeverLost(t *testing.T) {
	testkit.IO(t)
	const runs = 40
	var b *sagatest.Bed
	var signalled sync.Map
	steps := sagatest.PureSteps("wait")
	steps[0].Do = func(ctx context.Context, env *saga.Env) (saga.Outcome, error) {
		if _, seen := signalled.LoadOrStore(env.RunID, true); seen {
			return saga.Done(nil), nil
		}
		// The check found nothing; the event happens now, before the park. Half of the wakes race the park itself.
		signal := func() error {
			return pg.InTx(ctx, b.DB.Pool(pg.RoleLifecycle),
				func(ctx context.Context, tx pgx.Tx) error { return b.Core.Wake(ctx, tx, env.RunID) })
		}
		if env.RunID[35]%2 == 0 {
			return saga.Wait(saga.WaitFor{For: time.Hour, Why: "a signal", WakeOnSignal: true}), signal()
		}
		go func() {
			if err := pg.InTx(context.WithoutCancel(ctx), b.DB.Pool(pg.RoleLifecycle),
				func(ctx context.Context, tx pgx.Tx) error {
					return b.Core.Wake(ctx, tx, env.RunID)
				}); err != nil {
				t.Error(err)
			}
		}()
		return saga.Wait(saga.WaitFor{For: time.Hour, Why: "a signal", WakeOnSignal: true}), nil
	}
	b = sagatest.NewBed(t, saga.Definition{Name: "toy", Version: 1, Steps: steps, States: sagatest.States()})
	b.Drive(b.Config("a"))
	var all []string
	for range runs {
		_, id := b.Create("toy")
		all = append(all, id)
	}
	for _, id := range all {
		b.Await(id, testkit.Patience, "succeeded")
	}
}
