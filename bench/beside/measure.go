package beside

import (
	"context"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/gpuaas/mesh/bench/beside/peer"
	"github.com/gpuaas/mesh/bench/rig"
)

// contender is an engine under one load.
type contender struct {
	name    string
	stretch func(ctx context.Context, length time.Duration) (peer.Stretch, error)
	// catchUp returns when the engine's work behind its units is done too; nil: there is none.
	catchUp   func(ctx context.Context) error
	own       bool  // it runs in this process
	processes []int // others that it runs in
	settings  map[string]any

	stretches []peer.Stretch
	spent     spent // all of it
	behind    spent // the part of it after the end of each stretch
}

// spent is the resources used until a moment, or between two.
type spent struct {
	processor  time.Duration
	wal, pages int64
}

// meter reads the resources that a contender has used together with the database server.
type meter struct {
	rig        *rig.Rig
	postmaster int
}

func (m meter) read(ctx context.Context, c *contender) (spent, error) {
	s := spent{processor: rig.ServerTime(m.postmaster)}
	var err error
	if s.wal, s.pages, err = m.rig.Written(ctx); err != nil {
		return s, err
	}
	for _, pid := range c.processes {
		s.processor += rig.ProcessorTime(int32(pid)) // a process id
	}
	if c.own {
		own, err := rig.OwnTime()
		s.processor += own
		return s, err
	}
	return s, nil
}

// round measures one stretch of a contender.
func (m meter) round(ctx context.Context, c *contender, length time.Duration) error {
	before, err := m.read(ctx, c)
	if err != nil {
		return err
	}
	s, err := c.stretch(ctx, length)
	if err != nil {
		return fmt.Errorf("measure %s: %w", c.name, err)
	}
	c.stretches = append(c.stretches, s)
	end, err := m.read(ctx, c)
	if err != nil {
		return err
	}
	c.spent.add(before, end)
	if c.catchUp == nil {
		return nil
	}
	if err := c.catchUp(ctx); err != nil {
		return fmt.Errorf("measure %s: %w", c.name, err)
	}
	after, err := m.read(ctx, c)
	if err != nil {
		return err
	}
	c.spent.add(end, after)
	c.behind.add(end, after)
	return nil
}

// add adds the resources used between two moments.
func (s *spent) add(from, to spent) {
	s.processor += to.processor - from.processor
	s.wal += to.wal - from.wal
	s.pages += to.pages - from.pages
}

// alternate measures all contenders in turn, in rounds, each in the other order than the one before.
func (m meter) alternate(ctx context.Context, all []*contender, rounds int, length time.Duration) error {
	for n := range rounds {
		order := slices.Clone(all)
		if n%2 == 1 {
			slices.Reverse(order)
		}
		for _, c := range order {
			if err := m.round(ctx, c, length); err != nil {
				return err
			}
		}
	}
	return nil
}

// rate returns the median of units a second.
func (c *contender) rate() float64 { return c.median(peer.Stretch.Rate) }

func (c *contender) median(of func(peer.Stretch) float64) float64 {
	list := c.each(of)
	slices.Sort(list)
	if len(list) == 0 {
		return 0
	}
	return list[len(list)/2]
}

func (c *contender) each(of func(peer.Stretch) float64) []float64 {
	out := make([]float64, len(c.stretches))
	for i, s := range c.stretches {
		out[i] = math.Round(10*of(s)) / 10
	}
	return out
}

// describe adds the measurements and their method to the details of a result.
func (c *contender) describe(details map[string]any) {
	units := 0
	for _, s := range c.stretches {
		units += s.Units
	}
	details[c.name+": rounds"] = fmt.Sprintf("%v/s", c.each(peer.Stretch.Rate))
	details[c.name+": p50 ms"] = c.each(func(s peer.Stretch) float64 { return s.P50 })
	details[c.name+": p99 ms"] = c.each(func(s peer.Stretch) float64 { return s.P99 })
	if units > 0 {
		c.spent.describe(details, c.name+": ", units)
	}
	if units > 0 && c.catchUp != nil {
		c.behind.describe(details, c.name+": of it projection, ", units)
	}
	if c.settings != nil {
		details[c.name+": settings"] = c.settings
	}
}

// describe adds the cost of a unit to the details of a result.
func (s *spent) describe(details map[string]any, of string, units int) {
	details[of+"cpu ms a unit"] = math.Round(1e6*s.processor.Seconds()/float64(units)) / 1000
	details[of+"WAL bytes a unit"] = math.Round(float64(s.wal) / float64(units))
	details[of+"full pages a unit"] = math.Round(1000*float64(s.pages)/float64(units)) / 1000
}
