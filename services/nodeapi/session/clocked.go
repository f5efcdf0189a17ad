package session

import (
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
)

// clocked takes the clocks of a heartbeat and reports how far the host's is off when that changes. Before the session
// is admitted it is only noted, for the report of the admission.
func (h *handler) clocked(f *nodev1.Heartbeat, now time.Time) {
	_, arrived := h.server.cfg.Clock.Span()
	offset, changed := h.clock.Heartbeat(f, arrived, now)
	switch {
	case !changed:
	case h.sess.State() == commonv1.SessionState_SESSION_STATE_ADMITTED:
		h.server.deps.Clock(h.sess, offset)
	default:
		h.sess.SetClock(offset)
	}
}
