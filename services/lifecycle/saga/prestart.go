package saga

import (
	"context"
	"time"

	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
)

// Driver is a driver of this process. A run that is started takes a free worker of a driver, if there is one, so that
// it does not wait in the queue.
type Driver interface {
	// Reserve takes a free worker, or returns nil if none is free or the driver stops. It does not block.
	Reserve() *Worker
	// DriveOrFree is called once the transaction has ended for which a worker was reserved. It drives the run that was
	// inserted, or frees the worker if there is none, as after a rollback. If the outcome of the transaction is unknown,
	// committed is false, and the run is made due at once, if it exists.
	DriveOrFree(ctx context.Context, own *Worker, committed bool)
}

// Worker is a worker of a driver that waits for a run which is being started: the transaction that inserts the run also
// leases it to the worker's driver. If the process ends between the commit and the first step, the run stays leased
// until its lease ends, as any run whose driver dies.
type Worker struct {
	Owner  string        // of the lease
	Length time.Duration // of the lease
	Sent   time.Time     // when the lease was requested: its local deadline counts from here
	Run    *runs.Run     // that was inserted under the lease, with its open attempt; nil before
	Def    *Definition   // of Run
	Paused bool          // rollback mode was set when Run was inserted
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
