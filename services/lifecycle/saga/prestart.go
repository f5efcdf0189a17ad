package saga

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/pg"
)

// reserve takes a free worker of a driver of this process for a run that tx is about to start. It returns nil if none
// is free, or if tx takes no end hook (pg.OnEnd).
func (c *Core) reserve(ctx context.Context, tx pgx.Tx) *ownLease {
	d := c.freeDriver()
	if d == nil {
		return nil
	}
	own := &ownLease{driver: d, sent: time.Now()}
	if !pg.OnEnd(tx, func(committed bool) { own.end(context.WithoutCancel(ctx), committed) }) {
		d.slots <- struct{}{}
		return nil
	}
	return own
}

// freeDriver takes a free worker of a driver of this process for the caller and returns the driver, or nil if none is
// free.
func (c *Core) freeDriver() *Driver {
	c.driving.Lock()
	defer c.driving.Unlock()
	for _, d := range c.drivers {
		if d.halt.Load() {
			continue
		}
		select {
		case <-d.slots:
			c.reserved++
			c.resting.Store(false)
			return d
		default:
		}
	}
	return nil
}

// attach makes the driver's workers available to runs that this process starts, until detach.
func (c *Core) attach(d *Driver) {
	c.driving.Lock()
	defer c.driving.Unlock()
	c.drivers = append(c.drivers, d)
}

// detach ends attach. No run is given to the driver afterwards.
func (c *Core) detach(d *Driver) {
	c.driving.Lock()
	defer c.driving.Unlock()
	for i, other := range c.drivers {
		if other == d {
			c.drivers = append(c.drivers[:i:i], c.drivers[i+1:]...)
			return
		}
	}
}
