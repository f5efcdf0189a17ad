package sagatest

import (
	"fmt"

	"google.golang.org/protobuf/proto"

	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
)

// Announced returns an error unless the newest event of a run is its row, and those of its attempts are theirs.
func (b *Bed) Announced(id string) error {
	ctx := testkit.Context(b.T)
	run, err := runs.Get(ctx, b.DB.Pool(pg.RoleLifecycle), id)
	if err != nil {
		return err
	}
	timeline, err := runs.Timeline(ctx, b.DB.Pool(pg.RoleLifecycle), id)
	if err != nil {
		return err
	}
	list, err := testkit.ReadEvents(ctx, b.DB.Pool(pg.RoleLifecycle),
		`workflow_id = $1 AND kind IN ('run.changed', 'step.changed')`, id)
	if err != nil {
		return err
	}
	last, attempts := &lifecyclev1.Run{}, map[string]*lifecyclev1.StepAttempt{}
	note := func(a *lifecyclev1.StepAttempt) {
		key := fmt.Sprint(a.GetStep(), a.GetDirection(), a.GetAttempt())
		if before := attempts[key]; before == nil || before.GetVersion() < a.GetVersion() {
			attempts[key] = a
		}
	}
	for i := range list {
		r := &list[i].Record
		if r.Kind == "step.changed" {
			a := &lifecyclev1.StepAttempt{}
			if err := r.Decode(a); err != nil {
				return err
			}
			note(a)
			continue
		}
		seen := &lifecyclev1.Run{}
		if err := r.Decode(seen); err != nil {
			return err
		}
		for _, a := range seen.GetChangedSteps() {
			note(a)
		}
		if seen.GetVersion() >= last.GetVersion() {
			last = seen
		}
	}
	want := run.Proto()
	for _, p := range []*lifecyclev1.Run{want, last} {
		p.NextAt, p.HeartbeatAt, p.ChangedSteps = nil, nil, nil // these change without an event
	}
	if !proto.Equal(want, last) {
		return fmt.Errorf("the row is\n%v\nand its event\n%v", want, last)
	}
	for i := range timeline {
		a := timeline[i].Proto()
		key := fmt.Sprint(a.GetStep(), a.GetDirection(), a.GetAttempt())
		if got := attempts[key]; !proto.Equal(a, got) {
			return fmt.Errorf("the attempt is\n%v\nand its event\n%v", a, got)
		}
	}
	return nil
}
