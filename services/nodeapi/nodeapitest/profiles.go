package nodeapitest

import (
	"google.golang.org/protobuf/proto"

	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
)

// SendProfiles sends the watchers the valid versions of profiles, and those that come later after their snapshot.
func (p *Backend) SendProfiles(profiles ...*recoveryv1.AuthorityProfile) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.profiles = &recoveryv1.AuthorityProfiles{Profiles: profiles}
	for w := range p.watchers {
		p.putProfilesLocked(w)
	}
}

func (p *Backend) putProfilesLocked(w *watcher) {
	if p.profiles == nil {
		return
	}
	w.put(&recoveryv1.WatchAuthorityResponse{Frame: &recoveryv1.WatchAuthorityResponse_Profiles{
		Profiles: proto.CloneOf(p.profiles),
	}})
}
