package identity_test

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpuaas/mesh/agent/agenttest"
	"github.com/gpuaas/mesh/agent/identity"
	"github.com/gpuaas/mesh/agent/identity/envfile"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
)

// offer returns another version of the profile that answer gives: other endpoints, other trust for the node API, and
// none of its own for enrolment.
func (w *world) offer() *commonv1.Profile {
	if w.offered == nil {
		other, err := agenttest.NewAuthority("other", w.now)
		must(w.t, err)
		w.offered = &commonv1.Profile{
			Name: "dev", Version: 2, Fingerprint: "g", ApiUrl: "127.0.0.2:7001", RecoveryUrl: "https://127.0.0.2:7002",
			TerminalUrl: "https://127.0.0.2:7003", CaBundlePem: other.PEM(),
		}
	}
	return w.offered
}

func stored(s *identity.Store, profile *commonv1.Profile) error {
	_, err := s.StoreProfile(profile)
	return err
}

func (w *world) node(s *identity.Store) {
	key, err := s.PendingKey()
	must(w.t, err)
	must(w.t, s.CommitEnrolment(token, w.answer(key)))
}

// TestAnOfferedProfileIsThereWholeOrTheFormerIs checks that an offered profile replaces all files of the former one,
// and that going back brings all of them back.
func TestAnOfferedProfileIsThereWholeOrTheFormerIs(t *testing.T) {
	w := newWorld(t)
	s := w.open()
	w.node(s)
	before := w.image(s)
	anew, err := s.StoreProfile(w.offer())
	if err != nil || !anew {
		t.Fatalf("another endpoint: %t, %v", anew, err)
	}
	node, _ := s.Node()
	if node.ProfileVersion != 2 || node.ProfileFingerprint != "g" || s.UnconfirmedProfile() != "g" ||
		s.FormerProfile() != "f" {
		t.Errorf("node %+v, unconfirmed %q before %q", node, s.UnconfirmedProfile(), s.FormerProfile())
	}
	env := s.Env()
	for name, want := range map[string]string{
		envfile.APIURL: "127.0.0.2:7001", envfile.TerminalURL: "https://127.0.0.2:7003",
		envfile.RecoveryURL: "https://127.0.0.2:7002",
	} {
		if env.Get(name) != want {
			t.Errorf("%s is %q", name, env.Get(name))
		}
	}
	if s.RecoveryBundlePath() != s.BundlePath() {
		t.Errorf("trust for enrolment is %s", s.RecoveryBundlePath())
	}
	w.close(s)
	s = w.open() // a restart keeps the former one
	if back, err := s.RevertProfile(); err != nil || !back {
		t.Fatalf("back %t, %v", back, err)
	}
	after := w.image(s)
	before.Env, after.Env = "", "" // the order of the variables
	if diff := cmp.Diff(before, after); diff != "" {
		t.Errorf("another profile is back:\n%s", diff)
	}
	if env := s.Env(); env.Get(envfile.APIURL) != "127.0.0.1:7001" || env.Get(envfile.TerminalURL) != "" ||
		env.Get(envfile.RecoveryURL) != "https://127.0.0.1:7002" {
		t.Errorf("env %s", env.Render())
	}
	if back, err := s.RevertProfile(); err != nil || back {
		t.Errorf("once more: %t, %v", back, err)
	}
	w.close(s)
}

// TestAConfirmedProfileIsNotGivenUp, and neither is one whose files an operator has changed.
func TestAConfirmedProfileIsNotGivenUp(t *testing.T) {
	w := newWorld(t)
	s := w.open()
	w.node(s)
	must(t, stored(s, w.offer()))
	must(t, s.ConfirmProfile("another"))
	if s.UnconfirmedProfile() != "g" {
		t.Error("confirmed by the fingerprint of another")
	}
	must(t, s.ConfirmProfile("g"))
	if back, err := s.RevertProfile(); err != nil || back || s.UnconfirmedProfile() != "" {
		t.Errorf("back %t, %v", back, err)
	}
	next := w.offer()
	next.Fingerprint, next.Version, next.ApiUrl = "h", 3, "127.0.0.3:7001"
	must(t, stored(s, next))
	must(t, os.WriteFile(s.BundlePath(), w.ca.PEM(), 0o600))
	if back, err := s.RevertProfile(); err != nil || back || s.UnconfirmedProfile() != "" {
		t.Errorf("an operator's trust was replaced: back %t, %v", back, err)
	}
	if now, err := os.ReadFile(s.BundlePath()); err != nil || !bytes.Equal(now, w.ca.PEM()) {
		t.Errorf("bundle %s, %v", now, err)
	}
	w.close(s)
}

// TestTrustThatAnOperatorPinsOutlivesProfiles checks that a file of trust that an operator made for enrolment is
// neither replaced nor removed by a profile.
func TestTrustThatAnOperatorPinsOutlivesProfiles(t *testing.T) {
	w := newWorld(t)
	s := w.open()
	w.node(s)
	pinned := filepath.Join(t.TempDir(), "pinned.crt")
	must(t, os.WriteFile(pinned, w.ca.PEM(), 0o600))
	env := s.Env().With(envfile.RecoveryBundle, pinned)
	must(t, os.WriteFile(filepath.Join(w.dirs.Etc, "node-agent.env"), env.Render(), 0o600))
	must(t, s.ReloadEnv())
	offer := w.offer()
	tested, err := s.Replacing(offer)
	if err != nil || !bytes.Equal(tested.GetRecoveryCaBundlePem(), w.ca.PEM()) {
		t.Errorf("tested with %s, %v", tested.GetRecoveryCaBundlePem(), err)
	}
	must(t, stored(s, offer))
	if got := s.RecoveryBundlePath(); got != pinned {
		t.Errorf("trust for enrolment is %s", got)
	}
	if now, err := os.ReadFile(pinned); err != nil || !bytes.Equal(now, w.ca.PEM()) {
		t.Errorf("the pinned file is %s, %v", now, err)
	}
	w.close(s)
}

// TestAProfileThatCannotBeStoredChangesNothing.
func TestAProfileThatCannotBeStoredChangesNothing(t *testing.T) {
	w := newWorld(t)
	s := w.open()
	w.node(s)
	before := w.image(s)
	for name, change := range map[string]func(*commonv1.Profile){
		"no fingerprint": func(p *commonv1.Profile) { p.Fingerprint = "" },
		"no trust":       func(p *commonv1.Profile) { p.CaBundlePem = nil },
		"no endpoint":    func(p *commonv1.Profile) { p.ApiUrl = "" },
		"a quote":        func(p *commonv1.Profile) { p.TerminalUrl = "https://x'y" },
		"a line":         func(p *commonv1.Profile) { p.ApiUrl = "127.0.0.1:1\nGPUAAS_TRUST_DOMAIN=x" },
		"broken trust":   func(p *commonv1.Profile) { p.CaBundlePem = []byte("-----BEGIN CERTIFICATE-----\n") },
	} {
		w.offered = nil
		offer := w.offer()
		change(offer)
		if err := stored(s, offer); err == nil {
			t.Errorf("%s: stored", name)
		} else if name != "broken trust" && !errors.Is(err, identity.ErrProfileIncomplete) {
			t.Errorf("%s: %v", name, err)
		}
		if diff := cmp.Diff(before, w.image(s)); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
	}
	w.close(s)
}
