package drive_test

import (
	"context"
	"slices"
	"sync/atomic"
	"testing"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
	"github.com/gpuaas/mesh/services/lifecycle/saga/sagatest"
)

func TestFailureCompensatesInReverse(t *testing.T) {
	testkit.IO(t)
	var rec sagatest.Record
	steps := sagatest.Recorded(&rec, "one", "two", "three")
	steps[2].Do = func(context.Context, *saga.Env) (saga.Outcome, error) {
		rec.Add("do three")
		return saga.Outcome{}, saga.Fail(commonv1.OwnerLayer_OWNER_LAYER_DATABASE, commonv1.Reason_REASON_SCHEMA_FAILED,
			"no schema today", sagatest.ErrBoom)
	}
	b := newBed(t, saga.Definition{Name: "toy", Version: 1, Steps: steps, States: sagatest.States()})
	b.Drive(b.Config("a"))
	ws, id := b.Create("toy")
	r := b.Await(id, testkit.Patience, "failed")
	want := []string{"do one", "do two", "do three", "undo three", "undo two", "undo one"}
	if got := rec.All(); !slices.Equal(got, want) {
		t.Errorf("calls = %v, want %v", got, want)
	}
	if r.ErrorCode != "schema_failed" || r.ErrorLayer != "database" || r.Error != "no schema today" || r.ErrorStep != 2 {
		t.Errorf("run error = %s %s %q at %d", r.ErrorCode, r.ErrorLayer, r.Error, r.ErrorStep)
	}
	if w := b.Workspace(ws); w.State != "failed" || w.LastErrorCode != "schema_failed" ||
		w.LastError != "no schema today" {
		t.Errorf("workspace = %+v", w)
	}
}

func TestRetryableErrorIsRetriedWithItsKey(t *testing.T) {
	testkit.IO(t)
	var keys, seqs sagatest.Record
	var calls atomic.Int32
	steps := sagatest.PureSteps("one")
	steps[0].Do = func(_ context.Context, env *saga.Env) (saga.Outcome, error) {
		keys.Add("%s", env.IdempotencyKey)
		seqs.Add("%d", env.OpSeq)
		if calls.Add(1) < 3 {
			return saga.Outcome{}, sagatest.ErrBoom
		}
		return saga.Done(nil), nil
	}
	b := newBed(t, saga.Definition{Name: "toy", Version: 1, Steps: steps, States: sagatest.States()})
	b.Drive(b.Config("a"))
	_, id := b.Create("toy")
	b.Await(id, testkit.Patience, "succeeded")
	if got := keys.All(); len(got) != 3 || got[0] != got[2] || got[0] != id+"/one/do" {
		t.Errorf("idempotency keys = %v", got)
	}
	if got := seqs.All(); !slices.Equal(got, []string{"1", "2", "3"}) {
		t.Errorf("op_seq = %v: one per attempt", got)
	}
	list := b.Timeline(id)
	if len(list) != 3 || list[0].State != "failed" || list[0].ErrorCode != "internal" || list[2].State != "succeeded" {
		t.Errorf("timeline = %+v", list)
	}
}
