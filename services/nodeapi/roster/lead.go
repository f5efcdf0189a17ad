package roster

import (
	"time"

	"github.com/gpuaas/mesh/internal/pki"
)

// replaceSpread is the range from which agents that are asked to replace their session draw the delay.
const replaceSpread = 10 * time.Second

// lead returns how long before the end of its certificate a session's agent is asked to replace it.
func (r *Roster) lead(s *Session) time.Duration {
	if s.Identity.Life <= 0 {
		return r.cfg.ReplaceLead
	}
	return min(r.cfg.ReplaceLead, pki.Lead(s.Identity.Life))
}
