package drive_test

import (
	"context"
	"testing"

	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
	"github.com/gpuaas/mesh/services/lifecycle/saga/sagatest"
)

func TestRunSucceeds(t *testing.T) {
	testkit.IO(t)
	steps := sagatest.PureSteps("one", "two", "three")
	steps[0].Do = func(context.Context, *saga.Env) (saga.Outcome, error) { return saga.Done(map[string]int{"n": 7}), nil }
	got := make(chan int, 1)
	steps[2].Do = func(_ context.Context, env *saga.Env) (saga.Outcome, error) {
		var out struct{ N int }
		if _, err := env.Output("one", &out); err != nil {
			return saga.Outcome{}, err
		}
		got <- out.N
		return saga.Done(nil), nil
	}
	b := newBed(t, saga.Definition{Name: "toy", Version: 1, Steps: steps, States: sagatest.States()})
	b.Drive(b.Config("a"))
	ws, id := b.Create("toy")
	r := b.Await(id, testkit.Patience, "succeeded")
	if n := <-got; n != 7 {
		t.Errorf("output of step one = %d", n)
	}
	if w := b.Workspace(ws); w.State != "active" || w.Epoch != 1 || r.OpSeq != 3 || w.OpSeq < r.OpSeq {
		t.Errorf("workspace = %+v, run = %+v", w, r)
	}
	list := b.Timeline(id)
	if len(list) != 3 {
		t.Fatalf("timeline has %d attempts", len(list))
	}
	for i, a := range list {
		if a.State != "succeeded" || a.OpSeq != int64(i+1) || a.Fence != r.Fence || a.Attempt != 1 {
			t.Errorf("attempt %d = %+v", i, a)
		}
	}
}
