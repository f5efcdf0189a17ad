package saga

import (
	"context"

	"github.com/gpuaas/mesh/services/lifecycle/claims"
)

// undoFrom returns the step at which a compensation of h begins: the last one that may have left a resource, which is
// the present step or a later one with a claim adopted from an earlier run. -1 means that nothing is to be undone.
func (c *Core) undoFrom(ctx context.Context, h *leasedRun) (int, error) {
	from := h.run.Step
	held, err := claims.Live(ctx, c.db, h.run.WorkspaceID)
	if err != nil {
		return 0, err
	}
	live := map[string]bool{}
	for i := range held {
		live[held[i].Kind] = true
	}
	for i := len(h.def.Steps) - 1; i > from; i-- {
		for _, kind := range h.def.Steps[i].Kinds {
			if live[kind] {
				return undoable(h.def, i), nil
			}
		}
	}
	return undoable(h.def, from), nil
}
