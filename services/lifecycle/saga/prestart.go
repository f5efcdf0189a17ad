package saga

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
)

// Driver is a driver of this process. A run that is started takes a free worker of a driver, if there is one, so that
// it does not wait in the queue.
type Driver interface {
	// Reserve takes a free worker, or returns false if none is free or the driver stops. It does not block.
	Reserve() (Worker, bool)
}

// Worker is a worker of a driver that waits for a run which is being started: the transaction that inserts the run also
// leases it to the worker's driver.
type Worker interface {
	// Owner returns the owner of the lease.
	Owner() string
	// Length returns the length of the lease.
	Length() time.Duration
	// Hold stores the run that was inserted under the lease and returns its open attempt. paused is whether rollback mode
	// was set.
	Hold(run *runs.Run, def *Definition, paused bool) *runs.Attempt
	// End is called once the transaction has ended. It hands the run to the driver, or gives the worker back if there is
	// none. If the transaction was rolled back or its outcome is unknown, the run is made due at once, if it exists.
	End(ctx context.Context, committed bool)
}

// reserve takes a free worker of a driver of this process for a run that tx is about to start. It returns nil if none
// is free, or if tx takes no end hook (pg.OnEnd).
func (c *Core) reserve(ctx context.Context, tx pgx.Tx) Worker {
	own := c.freeWorker()
	if own == nil {
		return nil
	}
	if !pg.OnEnd(tx, func(committed bool) { own.End(context.WithoutCancel(ctx), committed) }) {
		own.End(ctx, false)
		return nil
	}
	return own
}

// freeWorker takes a free worker of a driver of this process for the caller, or returns nil if none is free.
func (c *Core) freeWorker() Worker {
	c.driving.Lock()
	defer c.driving.Unlock()
	for _, d := range c.drivers {
		if own, ok := d.Reserve(); ok {
			c.reserved++
			c.resting.Store(false)
			return own
		}
	}
	return nil
}

// Attach makes the driver's workers available to runs that this process starts, until Detach.
func (c *Core) Attach(d Driver) {
	c.driving.Lock()
	defer c.driving.Unlock()
	c.drivers = append(c.drivers, d)
}

// Detach ends Attach. No run is given to the driver afterwards.
func (c *Core) Detach(d Driver) {
	c.driving.Lock()
	defer c.driving.Unlock()
	for i, other := range c.drivers {
		if other == d {
			c.drivers = append(c.drivers[:i:i], c.drivers[i+1:]...)
			return
		}
	}
}
