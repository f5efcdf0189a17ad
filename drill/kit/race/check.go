package race

import (
	"context"
	"errors"
	"fmt"

	"github.com/gpuaas/mesh/drill/kit"
	"github.com/gpuaas/mesh/drill/kit/host"
	"github.com/gpuaas/mesh/drill/kit/mesh"
	"github.com/gpuaas/mesh/drill/kit/stage"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
)

// Check checks the driver's launch log, one launch for each epoch, never two alive and as many epochs as there were
// operations, and then asks the API for a finding on two instances, which the product's own detector makes.
func (x *Race) Check(ctx context.Context) error {
	r := x.r
	if !r.Mesh.Own() {
		if r.Control == kit.Mutated {
			return mesh.ErrNotOwn
		}
		return x.checkInstances(ctx)
	}
	ledger, err := r.Mesh.Launches()
	if err != nil {
		return stage.At(stage.Evidence, err)
	}
	n, live, err := host.CheckLaunches(ledger, x.id)
	if err == nil && (n != x.turns+1 || live != x.epoch) {
		err = fmt.Errorf("%d launches for a create and %d recreations; epoch %d lives, not %d", n, x.turns, live, x.epoch)
	}
	if err != nil {
		return stage.At(stage.Evidence, err)
	}
	r.Note("the driver's launch log has %d launches for %d epochs, one each, and never two alive", n, x.epoch)
	return x.detects(ctx)
}

// checkInstances checks the instances that the API lists, where the launch log is out of reach.
func (x *Race) checkInstances(ctx context.Context) error {
	resp, err := x.r.Mesh.Client.Query.ListInstances(ctx,
		&readmodelv1.ListInstancesRequest{PageSize: 500, WorkspaceId: x.id})
	if err != nil {
		return stage.At(stage.Evidence, err)
	}
	items := resp.GetItems()
	perEpoch, live := map[int64]int{}, 0
	for _, i := range items {
		perEpoch[i.GetEpoch()]++
		x.r.Evidence(i.GetInstanceId())
		if i.GetEndedAt() == nil {
			live++
		}
	}
	f, err := x.twoInstances(ctx)
	if err != nil || f != nil {
		return stage.At(stage.Evidence, errors.Join(err, openTwo(f)))
	}
	if live != 1 || len(perEpoch) != x.turns+1 || len(items) != len(perEpoch) {
		return stage.At(stage.Evidence, fmt.Errorf("%d instances of %d epochs, %d live, after a create and %d recreations",
			len(items), len(perEpoch), live, x.turns))
	}
	return nil
}
