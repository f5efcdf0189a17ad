package drill

import (
	"context"
	"errors"
	"fmt"

	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
)

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
