package kit

import (
	"context"
	"fmt"
	"time"
)

// The most that a scaled drill may take, whatever it waits for, and the most that all its steps may take together that
// put the mesh right afterwards. A drill whose mesh has gone would else wait for each of them in turn.
const (
	scaledLimit = 5 * time.Minute
	finalLimit  = 3 * time.Minute
)

// limited returns a context for the drill, which ends at its limit. With production timers a fault may last for hours,
// and there is none.
func (r *Run) limited(ctx context.Context) (context.Context, context.CancelFunc) {
	if !r.Mesh.Scaled {
		return context.WithCancel(ctx)
	}
	return context.WithTimeoutCause(ctx, scaledLimit, fmt.Errorf("the drill has taken %s, longer than any may",
		scaledLimit))
}

// Finally calls do, which puts something of the mesh right, also if the drill was cancelled. All calls of one drill
// have finalLimit together, a call within another the rest of that one's.
func (r *Run) Finally(ctx context.Context, do func(ctx context.Context)) {
	if r.finally {
		do(ctx)
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), finalLimit-r.finalTook)
	defer cancel()
	began := time.Now()
	r.finally = true
	defer func() {
		r.finally = false
		r.finalTook += time.Since(began)
	}()
	do(ctx)
}
