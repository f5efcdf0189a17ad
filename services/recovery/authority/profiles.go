package authority

import (
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
)

// profilesLocked sends the watchers the profiles of nodes if they have changed since they were sent last.
func (p *Poller) profilesLocked() {
	if p.deps.Profiles == nil {
		return
	}
	now := p.deps.Profiles()
	if now == p.profiles {
		return
	}
	p.profiles = now
	for w := range p.watchers {
		p.offerProfilesLocked(w)
	}
}

// offerProfilesLocked sends a watcher the profiles of nodes. It comes after the snapshot.
func (p *Poller) offerProfilesLocked(w *watcher) {
	if p.profiles == nil {
		return
	}
	p.offerLocked(w, &recoveryv1.WatchAuthorityResponse{
		Frame: &recoveryv1.WatchAuthorityResponse_Profiles{Profiles: p.profiles},
	})
}
