package task

import (
	"time"

	"github.com/gpuaas/mesh/agent/ledger"
)

const (
	maxEarly    = 1024
	prestartFor = 10 * time.Minute
)

// prestartCancels remembers cancels of tasks that were not offered yet: a cancel may overtake its offer between two
// sessions. It is used by one goroutine. When it is full the oldest cancel is dropped, and each is dropped after its
// time.
type prestartCancels struct {
	at    map[ledger.Key]time.Time
	order []ledger.Key // the same keys, oldest first
}

func (c *prestartCancels) add(key ledger.Key, now time.Time) {
	c.prune(now)
	if _, held := c.at[key]; held {
		return
	}
	if c.at == nil {
		c.at = map[ledger.Key]time.Time{}
	}
	for len(c.order) >= maxEarly {
		delete(c.at, c.order[0])
		c.order = c.order[1:]
	}
	c.at[key] = now
	c.order = append(c.order, key)
}

func (c *prestartCancels) has(key ledger.Key, now time.Time) bool {
	c.prune(now)
	_, held := c.at[key]
	return held
}

func (c *prestartCancels) prune(now time.Time) {
	for len(c.order) > 0 && now.Sub(c.at[c.order[0]]) > prestartFor {
		delete(c.at, c.order[0])
		c.order = c.order[1:]
	}
}
