package roster

import (
	"time"

	"github.com/gpuaas/mesh/internal/pki"
)

// replaceSpread is the range from which agents that are asked for a replacement draw its time.
const replaceSpread = 10 * time.Second

// lead is how long before the end of its certificate a session's replacement is asked for.
func (r *Roster) lead(s *Session) time.Duration {
	if s.Identity.Life <= 0 {
		return r.cfg.ReplaceLead
	}
	return min(r.cfg.ReplaceLead, pki.Lead(s.Identity.Life))
}
