package roster

import (
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
)

// profileOf is the profile of a session's agent, as the agent reports it, and what it was offered in place of it.
type profileOf struct {
	reported string                 // fingerprint
	facts    *commonv1.ProfileFacts // reported since Hello; nil: none were
	offers   []profileOffer
}

// profileOffer is one version that the agent was offered.
type profileOffer struct {
	fingerprint string
	version     int64
	answered    bool
}

// ReportedProfile returns the fingerprint of the profile that the agent reports; empty: it reports none.
func (s *Session) ReportedProfile() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.profile.reported
}

// OfferProfile records that the agent is offered a version, and returns whether to send the offer: not to an agent that
// reports this content or none, and to others once in a session. A content that comes again under a higher number is
// another version: the agent may have refused it as an older one.
func (s *Session) OfferProfile(fingerprint string, version int64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.gone || s.profile.reported == "" || s.profile.reported == fingerprint {
		return false
	}
	for _, o := range s.profile.offers {
		if o.fingerprint == fingerprint && o.version >= version {
			return false
		}
	}
	s.profile.offers = append(s.profile.offers, profileOffer{fingerprint: fingerprint, version: version})
	return true
}

// ProfileAnswered records the first answer to an offer, and returns false for any other answer. Facts that are not
// nil are of the profile that the agent has now.
func (s *Session) ProfileAnswered(fingerprint string, facts *commonv1.ProfileFacts) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range s.profile.offers {
		o := &s.profile.offers[i]
		if o.fingerprint != fingerprint || o.answered {
			continue
		}
		o.answered = true
		if facts != nil {
			s.profile.facts, s.profile.reported = facts, facts.GetFingerprint()
		}
		return true
	}
	return false
}

// ProfileChanged returns the session as an event reports it, after ProfileAnswered.
func (s *Session) ProfileChanged() *nodev1.SessionChanged { return s.Fact(s.State(), false) }
