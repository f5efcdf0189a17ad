package session

import (
	"context"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/wallclock"
	"github.com/gpuaas/mesh/services/nodeapi/roster"
	"github.com/gpuaas/mesh/services/nodeapi/session/bounds"
)

// offerPause is the time between two offers of a profile that has changed: each agent that is offered one connects to
// all its endpoints.
const offerPause = 5 * time.Millisecond

// profileBook has the versions of profiles that recovery has sent, and what nodes are told of them. The zero value
// has none. It is safe for concurrent use.
type profileBook struct {
	mu      sync.RWMutex
	active  map[string]string // fingerprints, by the name of the profile
	names   map[string]string // of the profiles, by the fingerprint of a valid version
	offered map[string]*nodev1.ConnectResponse
	// defaultFingerprint is the fingerprint of the active version of the default, and defaultName its name, as far as that
	// was known.
	defaultFingerprint, defaultName string
	changed                         chan struct{} // has a token when offered has changed
}

func newProfileBook() *profileBook { return &profileBook{changed: make(chan struct{}, 1)} }

// setDefault sets the fingerprint of the active version of the default, as recovery returns it for each session.
func (b *profileBook) setDefault(fingerprint string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.defaultFingerprint != fingerprint {
		b.defaultFingerprint = fingerprint
		b.nameDefaultLocked()
	}
}

func (b *profileBook) nameDefaultLocked() {
	if name := b.names[b.defaultFingerprint]; name != "" && name != b.defaultName {
		b.defaultName = name
		b.notify()
	}
}

func (b *profileBook) notify() {
	select {
	case b.changed <- struct{}{}:
	default:
	}
}

// replace takes the valid versions that recovery has sent.
func (b *profileBook) replace(sent *recoveryv1.AuthorityProfiles) {
	active, named := map[string]string{}, map[string]string{}
	offered := map[string]*nodev1.ConnectResponse{}
	for _, p := range sent.GetProfiles() {
		profile := p.GetProfile()
		named[profile.GetFingerprint()] = profile.GetName()
		if p.GetActive() {
			active[profile.GetName()] = profile.GetFingerprint()
		}
		if p.GetOffered() {
			offered[profile.GetName()] = &nodev1.ConnectResponse{Frame: &nodev1.ConnectResponse_ProfileOffer{
				ProfileOffer: &nodev1.ProfileOffer{Profile: profile},
			}}
		}
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.active, b.names, b.offered = active, named, offered
	b.nameDefaultLocked()
	b.notify()
}

// fingerprint returns what a node is told: the version that it reports if that is valid, else the active one of its
// profile. An empty name stands for the default.
func (b *profileBook) fingerprint(name, reported string) string {
	b.mu.RLock()
	defer b.mu.RUnlock()
	if _, valid := b.names[reported]; valid {
		return reported
	}
	if active := b.active[name]; name != "" && active != "" {
		return active
	}
	return b.defaultFingerprint
}

// offer returns the offer to nodes of a profile; nil: there is none.
func (b *profileBook) offer(name string) *nodev1.ConnectResponse {
	b.mu.RLock()
	defer b.mu.RUnlock()
	if name == "" {
		name = b.defaultName
	}
	return b.offered[name]
}

// Profiles takes the valid versions of profiles. It does not block.
func (s *Server) Profiles(sent *recoveryv1.AuthorityProfiles) { s.profiles.replace(sent) }

// announcedProfile returns the fingerprint that a session is told.
func (s *Server) announcedProfile(sess *roster.Session) string {
	return s.profiles.fingerprint(s.deps.View.Get(sess.Identity.NodeID).GetProfile(), sess.ReportedProfile())
}

// offerFor returns the offer of a profile that is due to a session, and records it; nil: none is, or the view does
// not have the node yet, and so not the name of its profile.
func (s *Server) offerFor(sess *roster.Session) *nodev1.ConnectResponse {
	n := s.deps.View.Get(sess.Identity.NodeID)
	if n == nil {
		return nil
	}
	frame := s.profiles.offer(n.GetProfile())
	profile := frame.GetProfileOffer().GetProfile()
	if frame == nil || !sess.OfferProfile(profile.GetFingerprint(), profile.GetVersion()) {
		return nil
	}
	s.deps.Metrics.Profile("offered")
	return frame
}

// offerAdmitted offers a session that was admitted what is due to it, at once or when the view has the node: one that
// has just enrolled may be admitted before that.
func (s *Server) offerAdmitted(sess *roster.Session) {
	if s.deps.View.Get(sess.Identity.NodeID) == nil {
		s.unseen.Store(sess.Identity.NodeID, sess)
		if s.deps.View.Get(sess.Identity.NodeID) == nil {
			return
		}
		s.unseen.CompareAndDelete(sess.Identity.NodeID, sess) // it came meanwhile, perhaps before it was awaited
	}
	if frame := s.offerFor(sess); frame != nil {
		sess.SendInline(frame)
	}
}

// Decided takes a decision that the view has. It does not block.
func (s *Server) Decided(n *recoveryv1.NodeAuthority) {
	found, _ := s.unseen.LoadAndDelete(n.GetNodeId())
	if sess, ok := found.(*roster.Session); ok {
		if frame := s.offerFor(sess); frame != nil {
			sess.Send(frame)
		}
	}
}

// offerProfiles offers versions that have changed to the sessions that stand, one after another, until ctx ends. A
// session that is admitted meanwhile is offered what is due as it is admitted.
func (s *Server) offerProfiles(ctx context.Context) error {
	for {
		select {
		case <-s.profiles.changed:
		case <-ctx.Done():
			return nil
		}
		for _, sess := range s.deps.Roster.CurrentAll() {
			frame := s.offerFor(sess)
			if frame == nil {
				continue
			}
			sess.Send(frame)
			if !app.Sleep(ctx, offerPause) {
				return nil
			}
		}
	}
}

// profileAnswered takes an agent's answer to an offer, and believes it: the profile that it has now is reported as
// that of the session, and a refusal as a diagnostic of its host. An answer to no offer of this session changes
// nothing.
func (h *handler) profileAnswered(f *nodev1.ProfileAnswer) {
	facts := f.GetProfile()
	if f.GetRefused() != nil {
		facts = nil
	}
	if !h.sess.ProfileAnswered(f.GetFingerprint(), boundedProfile(facts)) {
		h.server.deps.Metrics.Profile("unasked")
		return
	}
	if f.GetRefused() == nil {
		h.server.deps.Metrics.Profile("taken")
		if facts != nil {
			h.server.deps.Profile(h.sess)
		}
		return
	}
	h.server.deps.Metrics.Profile("refused")
	refusal := &commonv1.Diagnostic{
		Code:       commonv1.DiagnosticCode_DIAGNOSTIC_CODE_PROFILE_REFUSED,
		Detail:     names.OfSet(f.GetRefused().GetReason()) + ": " + f.GetRefused().GetMessage(),
		ObservedAt: timestamppb.New(h.server.cfg.Clock.Now()), FirstSeenAt: timestamppb.New(h.server.cfg.Clock.Now()),
	}
	bounds.Records([]*commonv1.Diagnostic{refusal}, h.server.cfg.Clock.Now()) // not counted: the agent did not send it
	h.diagnose(h.diags.take([]*commonv1.Diagnostic{refusal}, wallclock.Now()))
}

const (
	// mostFingerprint and mostProfileText bound what an agent reports of its profile, in bytes.
	mostFingerprint = 128
	mostProfileText = 256
)

// boundedProfile returns what an agent reports of its profile, cut to what a working agent reports. Nil stays nil.
func boundedProfile(f *commonv1.ProfileFacts) *commonv1.ProfileFacts {
	if f == nil {
		return nil
	}
	text := func(s string) string { return bounds.OneLine(s, mostProfileText) }
	return &commonv1.ProfileFacts{
		Fingerprint: bounds.OneLine(f.GetFingerprint(), mostFingerprint), ApiHost: text(f.GetApiHost()),
		RecoveryHost: text(f.GetRecoveryHost()), TerminalHost: text(f.GetTerminalHost()),
		InstallRoot: text(f.GetInstallRoot()), Unit: text(f.GetUnit()), PackageSource: text(f.GetPackageSource()),
		Name: bounds.OneLine(f.GetName(), mostFingerprint),
	}
}
