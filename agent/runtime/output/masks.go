package output

import (
	"slices"
	"sync"

	"github.com/gpuaas/mesh/internal/showable"
)

// maskCache keeps the masks that were used last, since making one takes much longer than using it. It is safe for
// concurrent use.
type maskCache struct {
	mu    sync.Mutex
	masks []cachedMask // the last used one first
}

type cachedMask struct {
	values []string
	mask   showable.Mask
}

// of returns the mask of values, from the cache if it is there.
func (c *maskCache) of(values []string) showable.Mask {
	const most = 4 // each may take some MiB
	if len(values) == 0 {
		return showable.Mask{}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	at := slices.IndexFunc(c.masks, func(m cachedMask) bool { return slices.Equal(m.values, values) })
	var found cachedMask
	if at >= 0 {
		found = c.masks[at]
		c.masks = slices.Delete(c.masks, at, at+1)
	} else {
		found = cachedMask{values, showable.NewMask(values)}
	}
	c.masks = slices.Insert(c.masks, 0, found)
	if len(c.masks) > most {
		c.masks = slices.Delete(c.masks, most, len(c.masks))
	}
	return found.mask
}
