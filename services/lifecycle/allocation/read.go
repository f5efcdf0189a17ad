package allocation

import (
	"context"
	"fmt"

	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/pg"
)

var allocationsByID = pg.Define(pg.RoleLifecycle, "allocation.allocations_by_id",
	`SELECT `+Columns+` FROM lifecycle.allocation a WHERE a.allocation_id = ANY ($1::uuid[])`)

// ReadAllocations returns allocations as their rows stand, in the form that their events have, for a caller who
// compares the two. Ids without an allocation are left out.
func ReadAllocations(ctx context.Context, q pg.Querier, ids []string) ([]*lifecyclev1.Allocation, error) {
	list, err := All(ctx, q, allocationsByID, ids)
	if err != nil {
		return nil, fmt.Errorf("read allocations: %w", err)
	}
	out, err := each(list, func(a Allocation) (*lifecyclev1.Allocation, error) {
		p, ok := a.Event().Payload.(*lifecyclev1.Allocation)
		if !ok {
			return nil, fmt.Errorf("the event of allocation %s carries no allocation", a.ID)
		}
		return p, nil
	})
	if err != nil {
		return nil, fmt.Errorf("read allocations: %w", err)
	}
	return out, nil
}
