package drive

import (
	"context"

	"github.com/gpuaas/mesh/services/lifecycle/claims"
	"github.com/gpuaas/mesh/services/lifecycle/saga/lease"
)

// undoFrom returns the step at which a compensation of h begins: the last one that may have left a resource, which is
// the present step or a later one with a claim adopted from an earlier run. -1 means that nothing is to be undone.
func (d *Driver) undoFrom(ctx context.Context, h *lease.Run) (int, error) {
	from := h.Run.Step
	held, err := claims.Live(ctx, d.core.DB(), h.Run.WorkspaceID)
	if err != nil {
		return 0, err
	}
	live := map[string]bool{}
	for i := range held {
		live[held[i].Kind] = true
	}
	for i := len(h.Def.Steps) - 1; i > from; i-- {
		for _, kind := range h.Def.Steps[i].Kinds {
			if live[kind] {
				return h.Def.Undoable(i), nil
			}
		}
	}
	return h.Def.Undoable(from), nil
}
