package keyset

import (
	"fmt"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
)

// unconfirmedAfter returns how long a replica may sign without having read that its key is still the one that signs. A
// key is retired no sooner than its overlap after another one signs, so a message that is signed within this time
// reaches its reader before the key is retired.
func (k Kind) unconfirmedAfter() time.Duration { return k.Overlap() - 30*time.Second }

// mayStillSign fails if the replica last read too long ago that its key is the one that signs. Both clocks count: the
// monotonic one stands still while a machine sleeps.
func (p *part) mayStillSign(now time.Time) error {
	at := p.confirmed.Load()
	if at != nil && max(now.Sub(*at), now.Round(0).Sub(at.Round(0))) <= p.Kind.unconfirmedAfter() {
		return nil
	}
	return fault.New(commonv1.Reason_REASON_SIGNING_KEY_UNCONFIRMED,
		fmt.Sprintf("this replica could not read for %s which key of %s signs",
			p.Kind.unconfirmedAfter(), p.Kind))
}

// privates copies the private keys into view: those of the files that the set has, and those that were loaded before,
// so that a key stays in use if its file is removed. It reports whether the key that signs is here.
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
		// Another replica's key signs and is not here. All replicas verify the former key until its overlap is over, and this
		// one signs with it no longer than that.
		view.Signing = p.view.Signing
	}
	return false
}
