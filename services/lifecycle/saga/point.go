package saga

import (
	"context"

	"github.com/gpuaas/mesh/internal/failpoint"
	"github.com/gpuaas/mesh/internal/names"
)

func (e *Env) place() Place {
	return Place{RunID: e.RunID, Step: e.Step, Direction: names.Of(e.Direction)}
}

// Place is where a run is when it passes a kill point.
type Place struct {
	RunID     string
	Step      int
	Direction string
}

// Point passes the kill point lifecycle.saga.<name>.
func (c *Core) Point(ctx context.Context, name string, at Place) error {
	if c.onPoint != nil {
		if err := c.onPoint(ctx, name, at); err != nil {
			return err
		}
	}
	return failpoint.Hit("lifecycle.saga." + name)
}

// Observe calls the hook of tests and benches, without a failpoint.
func (c *Core) Observe(ctx context.Context, name string, at Place) error {
	if c.onPoint == nil {
		return nil
	}
	return c.onPoint(ctx, name, at)
}
