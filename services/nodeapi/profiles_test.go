package nodeapi_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
)

// version is one version of a profile, whose fingerprint is its text. That of the default's active version is
// `profile` in the backend of tests.
func version(name, fingerprint string, number int64, offered, active bool) *recoveryv1.AuthorityProfile {
	return &recoveryv1.AuthorityProfile{
		Profile: &commonv1.Profile{Name: name, Fingerprint: fingerprint, Version: number, CaBundlePem: []byte("roots")},
		Offered: offered, Active: active,
	}
}

func reporting(fingerprint string) func(*nodev1.Hello) {
	return func(h *nodev1.Hello) { h.Profile = &commonv1.ProfileFacts{Fingerprint: fingerprint} }
}

func answer(fingerprint string, has *commonv1.ProfileFacts, refused *commonv1.Denial) *nodev1.ConnectRequest {
	return &nodev1.ConnectRequest{Frame: &nodev1.ConnectRequest_ProfileAnswer{ProfileAnswer: &nodev1.ProfileAnswer{
		Fingerprint: fingerprint, Profile: has, Refused: refused,
	}}}
}

// profile sends a heartbeat and returns the fingerprint in its answer, and the offers that came before.
func (a *agent) profile() (string, []string) {
	a.t.Helper()
	var offers []string
	a.send(beat(1))
	ack := a.next("an acknowledged heartbeat", func(f *nodev1.ConnectResponse) bool {
		if o := f.GetProfileOffer(); o != nil {
			offers = append(offers, o.GetProfile().GetFingerprint())
		}
		return f.GetHeartbeatAck().GetSequence() == 1
	}).GetHeartbeatAck()
	return ack.GetProfileFingerprint(), offers
}

func (a *agent) offered(want string) {
	a.t.Helper()
	got := a.next("an offer of a profile", func(f *nodev1.ConnectResponse) bool { return f.GetProfileOffer() != nil }).
		GetProfileOffer().GetProfile()
	if got.GetFingerprint() != want || len(got.GetCaBundlePem()) == 0 {
		a.t.Fatalf("offered %v, want %s", got, want)
	}
}

func (k *kit) event(what, session string, is func(testkit.Event) bool) {
	k.t.Helper()
	testkit.Eventually(k.t, testkit.Patience, func() error {
		list, err := testkit.ReadEvents(k.t.Context(), k.db.Pool(pg.RoleReadmodel),
			`kind = 'session.changed' AND aggregate_id = $1`, session)
		if err == nil && !slices.ContainsFunc(list, is) {
			err = errors.New(what + " is in no event")
		}
		return err
	})
}

// TestProfilesAreOfferedOnce follows versions through the phases with agents that have the former one, the new one, a
// version of another name, and none.
func TestProfilesAreOfferedOnce(t *testing.T) {
	k := newKit(t)
	k.backend.SendProfiles(version("site", "profile", 1, true, true))
	r := k.replica()
	connect := func(fingerprint string) *agent {
		t.Helper()
		a := k.node()
		k.connect(a, r.AgentAddr(), true)
		a.open(reporting(fingerprint))
		return a
	}
	former, none, moved := connect("profile"), connect(""), k.node()
	k.raised(former)
	if profile, offers := former.profile(); profile != "profile" || len(offers) != 0 {
		t.Fatalf("told %s, offered %v", profile, offers)
	}
	k.backend.SendProfiles(version("site", "profile", 1, false, true), version("site", "next", 2, true, false),
		version("edge", "other", 1, true, true))
	former.offered("next")
	k.backend.SendProfiles(version("site", "profile", 1, false, false), version("site", "next", 2, true, true),
		version("edge", "other", 1, true, true))
	// Its version is retiring, which is valid: it is told nothing else, and not offered the same version again.
	late := connect("unknown")
	late.offered("next") // by then the versions that were sent last are known
	if profile, offers := former.profile(); profile != "profile" || len(offers) != 0 {
		t.Errorf("told %s, offered %v again", profile, offers)
	}
	if profile, offers := none.profile(); len(offers) != 0 {
		t.Errorf("an agent that reports no profile is told %s and offered %v", profile, offers)
	}
	if profile, _ := late.profile(); profile != "profile" { // as recovery has answered its opening
		t.Errorf("told %s", profile)
	}
	// The same content under a higher number is another version: the agent may have refused it as an older one.
	k.backend.SendProfiles(version("site", "profile", 1, false, false), version("site", "next", 3, true, true),
		version("edge", "other", 1, true, true))
	late.offered("next")
	// The next session of the same node is offered it again, unless it has it.
	again := former.again()
	k.connect(again, r.AgentAddr(), true)
	again.open(reporting("profile"))
	again.offered("next")
	has := connect("next")
	if profile, offers := has.profile(); profile != "next" || len(offers) != 0 {
		t.Errorf("told %s, offered %v", profile, offers)
	}
	// A node of another profile is offered that one.
	k.backend.Change(moved.id, func(n *recoveryv1.NodeAuthority) { n.Profile = "edge" })
	k.connect(moved, r.AgentAddr(), true)
	moved.open(reporting("profile"))
	moved.offered("other")
	// A version that is not valid any more is told the active one.
	k.backend.SendProfiles(version("edge", "other", 1, true, true))
	testkit.Eventually(t, patience, func() error {
		if profile, offers := has.profile(); profile != "profile" || len(offers) != 0 {
			return fmt.Errorf("told %s, offered %v", profile, offers)
		}
		return nil
	})
}

// TestAnswersToOffers checks that what an agent has taken, or refused, is reported, and an answer to no
// offer is not.
func TestAnswersToOffers(t *testing.T) {
	k := newKit(t)
	k.backend.SendProfiles(version("site", "profile", 1, false, true), version("site", "next", 2, true, false))
	r := k.replica()
	a, b := k.node(), k.node()
	for _, each := range []*agent{a, b} {
		k.connect(each, r.AgentAddr(), true)
		each.open(reporting("profile"))
		each.offered("next")
		k.raised(each)
		each.send(answer("forged", &commonv1.ProfileFacts{Fingerprint: "forged"}, nil))
	}
	a.send(answer("next", &commonv1.ProfileFacts{Fingerprint: "next", Name: "site", ApiHost: "api\n:1"}, nil))
	a.send(answer("next", &commonv1.ProfileFacts{Fingerprint: "twice"}, nil))
	k.event("the profile that was taken", a.session, func(e testkit.Event) bool {
		return e.Text("profile", "fingerprint") == "next" && e.Text("profile", "api_host") == "api :1"
	})
	if profile, _ := a.profile(); profile != "next" {
		t.Errorf("told %s", profile)
	}
	b.send(answer("next", &commonv1.ProfileFacts{Fingerprint: "next"}, &commonv1.Denial{
		Reason: commonv1.Reason_REASON_PROFILE_UNVERIFIED, Message: "the node API is not trusted" + strings.Repeat(".", 600),
	}))
	k.event("the refusal", b.session, func(e testkit.Event) bool {
		return e.Text("diagnostics", "0", "code") == "DIAGNOSTIC_CODE_PROFILE_REFUSED" &&
			strings.HasPrefix(e.Text("diagnostics", "0", "detail"), "profile_unverified: the node API is not trusted")
	})
	if cut := k.counter(r, "agent_diagnostics_cut_total", `cause="size"`); cut != 0 {
		t.Errorf("%g entries count as sent by agents and cut", cut)
	}
	if profile, _ := b.profile(); profile != "profile" {
		t.Errorf("told %s", profile)
	}
	for _, e := range testkit.Events(t, k.db.Pool(pg.RoleReadmodel), `kind = 'session.changed'`) {
		if f := e.Text("profile", "fingerprint"); f == "forged" || f == "twice" ||
			e.AggregateID == b.session && f == "next" {
			t.Errorf("an answer to no offer was taken: %s", f)
		}
	}
}
