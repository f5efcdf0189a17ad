package keyset

import (
	"fmt"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
)

// unconfirmedAfter is how long a replica signs without having read that its key still signs. A key is retired no sooner than its overlap after
// another one signs, so what is signed within this time comes to its reader before that.
func (k Kind) unconfirmedAfter() time.Duration { return k.Overlap() - 30*time.Second }

// mayStillSign fails if it is too long ago that the key that signs was found to be the one. Both clocks count: the monotonic one stands still while a
// machine sleeps.
func (p *part) mayStillSign(now time.Time) error {
	at := p.confirmed.Load()
	if at != nil && max(now.Sub(*at), now.Round(0).Sub(at.Round(0))) <= p.Kind.unconfirmedAfter() {
		return nil
	}
	return fault.New(commonv1.Reason_REASON_SIGNING_KEY_UNCONFIRMED, fmt.Sprintf("this replica could not read for %s which key of %s signs",
		p.Kind.unconfirmedAfter(), p.Kind))
}

// privates takes the private keys over: those of the files that the set knows, and those that were loaded before, so that a file that goes does not
// take its key along. It reports whether the key that signs is here.
func (s *Set) privates(p *part, view *View, rows []Key) bool {
	for _, row := range rows {
		if row.State == Retired {
			continue
		}
		private := p.private(row.KeyID)
		if private == nil && p.view != nil {
			private = p.view.Privates[row.KeyID]
		}
		if private == nil {
			continue
		}
		view.Privates[row.KeyID] = private
		if row.State == Signing {
			view.Signing = private
		}
	}
	if view.Signing != nil {
		return true
	}
	if p.view != nil {
		// Another replica's key signs and is not here. What signed before is verified by all for the time of the overlap, and signs no longer.
		view.Signing = p.view.Signing
	}
	return false
}
