package identity_test

import (
	"crypto/ecdsa"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpuaas/mesh/agent/agenttest"
	"github.com/gpuaas/mesh/agent/identity"
	"github.com/gpuaas/mesh/agent/identity/envfile"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/bundle"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/testkit"
)

const bundleToken = "gnb_0123456789abcdef0123456789abcdef_secret"

// sealed returns an archive for the world's node, after change has changed its contents.
func (w *world) sealed(change func(*bundle.Manifest, map[string]string)) *bundle.Archive {
	w.t.Helper()
	next, err := agenttest.NewAuthority("next", time.Now())
	must(w.t, err)
	by, err := next.Pair(pki.ServiceID(agenttest.TrustDomain, "recovery"), time.Now().Add(-time.Hour),
		time.Now().Add(time.Hour))
	must(w.t, err)
	manifest := bundle.Manifest{NodeID: w.nodeID, NodeName: "n1", TrustDomain: agenttest.TrustDomain, TokenID: ids.New()}
	env := map[string]string{
		bundle.EnvAPIURL: "https://127.0.0.1:8001", bundle.EnvRecoveryURL: "https://127.0.0.1:8002",
		bundle.EnvRecoveryBundle: bundle.FileRecoveryCA, bundle.EnvTrustDomain: agenttest.TrustDomain,
		bundle.EnvNodeName: "n1", bundle.EnvToken: bundleToken,
	}
	if change != nil {
		change(&manifest, env)
	}
	var variables []bundle.Variable
	for name, value := range env {
		variables = append(variables, bundle.Variable{Name: name, Value: value})
	}
	rendered, err := bundle.RenderEnv(variables...)
	must(w.t, err)
	data, err := bundle.Write(manifest, bundle.Files{Env: rendered, CA: next.PEM(), RecoveryCA: next.PEM()}, by)
	must(w.t, err)
	archive, err := bundle.Read(data)
	must(w.t, err)
	return archive
}

// archive returns the bundle of sealed.
func (w *world) archive(change func(*bundle.Manifest, map[string]string)) *identity.Bundle {
	w.t.Helper()
	b, err := identity.BundleOf(w.sealed(change))
	must(w.t, err)
	return b
}

// An archive replaces all endpoints and both bundles of trust, and what it replaced can be put back as it was.
func TestAnArchiveReplacesTheProfileAndIsTakenBack(t *testing.T) {
	testkit.IO(t)
	w := newWorld(t)
	s := w.open()
	defer func() { w.close(s) }()
	if err := s.RestoreFormer(); !errors.Is(err, identity.ErrNothingBefore) {
		t.Errorf("without a bundle: %v", err)
	}
	w.enrolled(s)
	env := s.Env().With(envfile.TerminalURL, "https://127.0.0.1:7003")
	must(t, os.WriteFile(filepath.Join(w.dirs.Etc, "node-agent.env"), env.Render(), 0o600))
	must(t, s.ReloadEnv())
	before := w.image(s)
	given := w.archive(nil)
	profile, err := s.CheckBundle(given)
	must(t, err)
	if profile.GetApiUrl() != "https://127.0.0.1:8001" || profile.GetTerminalUrl() != "" {
		t.Errorf("the profile to test is %v", profile)
	}
	if diff := cmp.Diff(before, w.image(s)); diff != "" {
		t.Fatalf("the check changed something:\n%s", diff)
	}
	must(t, s.InstallBundle(given))
	for name, want := range map[string]string{
		envfile.APIURL: "https://127.0.0.1:8001", envfile.TerminalURL: "", envfile.Token: bundleToken,
	} {
		if got := s.Env().Get(name); got != want {
			t.Errorf("%s is %q", name, got)
		}
	}
	if got := w.image(s); got.Bundle != string(profile.GetCaBundlePem()) || got.Recovery != got.Bundle ||
		got.Current != before.Current || got.Join != before.Join {
		t.Errorf("the host has %+v", got)
	}
	if !holdsToken(s, firstRecovery) {
		t.Error("the recovery token is lost while the bundle's token was not used")
	}
	must(t, s.InstallBundle(given)) // again: the state before the first time can still be put back
	w.close(s)
	s = w.open()
	must(t, s.RestoreFormer())
	got := w.image(s)
	if diff := cmp.Diff(lineSet(before.Env), lineSet(got.Env)); diff != "" {
		t.Errorf("node-agent.env is another one (-was +is):\n%s", diff)
	}
	before.Env, got.Env, before.Pending, got.Pending = "", "", "", ""
	if diff := cmp.Diff(before, got); diff != "" {
		t.Errorf("the host is not as it was (-was +is):\n%s", diff)
	}
	if err := s.RestoreFormer(); !errors.Is(err, identity.ErrNothingBefore) {
		t.Errorf("once more: %v", err)
	}
}

func lineSet(text string) map[string]bool {
	out := map[string]bool{}
	for line := range strings.Lines(text) {
		out[line] = true
	}
	return out
}

// Once the bundle's token was used, taking the endpoints back leaves the tokens of the new enrolment alone.
func TestAProfileIsTakenBackAfterTheEnrolment(t *testing.T) {
	testkit.IO(t)
	w := newWorld(t)
	s := w.open()
	defer func() { w.close(s) }()
	w.enrolled(s)
	api := s.Env().Get(envfile.APIURL)
	must(t, s.InstallBundle(w.archive(nil)))
	key, err := s.PendingKey()
	must(t, err)
	answer := w.answer(key)
	answer.RecoveryToken, answer.Profile = secondRecovery, &commonv1.Profile{}
	must(t, s.CommitEnrolment(bundleToken, answer))
	serialNow := serial(s.Certificate())
	must(t, s.RestoreFormer())
	if s.Env().Get(envfile.APIURL) != api || serial(s.Certificate()) != serialNow || !holdsToken(s, secondRecovery) {
		t.Errorf("the host has %+v", w.image(s))
	}
	if err := s.InstallBundle(w.archive(nil)); !errors.Is(err, identity.ErrBundleSpent) {
		t.Errorf("the same bundle again: %v", err)
	}
}

// The profile that a host reports is the one that its endpoints and its trust are of, also after they were put back.
func TestTheFormerProfileIsReportedAfterItIsBack(t *testing.T) {
	testkit.IO(t)
	w := newWorld(t)
	s := w.open()
	defer func() { w.close(s) }()
	w.enrolled(s)
	before, _ := s.Node()
	must(t, s.InstallBundle(w.archive(nil)))
	key, err := s.PendingKey()
	must(t, err)
	answer := w.answer(key)
	answer.RecoveryToken, answer.Profile = secondRecovery, w.offer()
	must(t, s.CommitEnrolment(bundleToken, answer))
	must(t, s.RestoreFormer())
	w.close(s)
	s = w.open()
	after, _ := s.Node()
	if s.Env().Get(envfile.APIURL) == "127.0.0.2:7001" || after.ProfileFingerprint != before.ProfileFingerprint ||
		after.ProfileVersion != before.ProfileVersion || after.ProfileAPI != before.ProfileAPI ||
		after.TokenHash == before.TokenHash {
		t.Errorf("the host is %+v, was %+v", after, before)
	}
}

// A bundle that takes the place of an offered profile over which no session was admitted is followed by the profile
// before that, not by one that may lead nowhere.
func TestABundleInPlaceOfAnUnconfirmedProfile(t *testing.T) {
	testkit.IO(t)
	w := newWorld(t)
	s := w.open()
	defer func() { w.close(s) }()
	w.enrolled(s)
	before := w.image(s)
	must(t, stored(s, w.offer()))
	must(t, s.InstallBundle(w.archive(nil)))
	must(t, s.RestoreFormer())
	after := w.image(s)
	if diff := cmp.Diff(lineSet(before.Env), lineSet(after.Env)); diff != "" || after.Bundle != before.Bundle ||
		after.Recovery != before.Recovery || after.Node != before.Node || s.UnconfirmedProfile() != "" {
		t.Errorf("the host has %+v, had %+v: %s", after, before, diff)
	}
}

// The files that an earlier bundle has replaced are not put back after a later one on a host that had no endpoints any
// more.
func TestABundleOnAHostWithoutEndpointsHasNothingBefore(t *testing.T) {
	testkit.IO(t)
	w := newWorld(t)
	s := w.open()
	defer func() { w.close(s) }()
	w.enrolled(s)
	must(t, s.InstallBundle(w.archive(nil)))
	must(t, os.WriteFile(filepath.Join(w.dirs.Etc, "node-agent.env"), nil, 0o600))
	must(t, s.ReloadEnv())
	must(t, s.InstallBundle(w.archive(func(_ *bundle.Manifest, env map[string]string) {
		env[bundle.EnvToken] = "gnb_0123456789abcdef0123456789abcdee_secret"
	})))
	if err := s.RestoreFormer(); !errors.Is(err, identity.ErrNothingBefore) {
		t.Errorf("%v, env %s", err, s.Env().Render())
	}
}

// Archives that are not for this node, or whose environment has settings that no bundle has, change nothing.
func TestArchivesThatAreNotForThisHostAreRefused(t *testing.T) {
	testkit.IO(t)
	w := newWorld(t)
	s := w.open()
	defer func() { w.close(s) }()
	w.enrolled(s)
	before := w.image(s)
	set := func(name, value string) func(*bundle.Manifest, map[string]string) {
		return func(_ *bundle.Manifest, env map[string]string) { env[name] = value }
	}
	for name, change := range map[string]func(*bundle.Manifest, map[string]string){
		"another node": func(m *bundle.Manifest, _ map[string]string) { m.NodeID = ids.New() },
		"another trust domain": func(m *bundle.Manifest, env map[string]string) {
			m.TrustDomain, env[bundle.EnvTrustDomain] = "b", "b"
		},
		"two trust domains": set(bundle.EnvTrustDomain, "b"),
		"task keys":         set(envfile.TaskKeys, "k:AAAA"),
		"other file":        set(bundle.EnvRecoveryBundle, "/etc/ssl/cert.pem"),
		"recovery token":    set(bundle.EnvToken, "grt_x"),
		"no token":          set(bundle.EnvToken, ""),
		"unknown variable":  set("LD_PRELOAD", "/x.so"),
	} {
		b, err := identity.BundleOf(w.sealed(change))
		if err == nil {
			err = s.InstallBundle(b)
		}
		if !fault.Has(err, commonv1.Reason_REASON_BUNDLE_INVALID) {
			t.Errorf("%s: %v", name, err)
		}
		if diff := cmp.Diff(before, w.image(s)); diff != "" {
			t.Fatalf("%s changed something:\n%s", name, diff)
		}
	}
}

// Between a bundle and the enrolment with it the host's address is the operator's: that it is not the one of the
// profile from before is no drift. With the former endpoints that profile's address is known again.
func TestABundlesAddressIsComparedWithNoProfile(t *testing.T) {
	testkit.IO(t)
	w := newWorld(t)
	s := w.open()
	defer func() { w.close(s) }()
	w.enrolled(s)
	before, _ := s.Node()
	dir := t.TempDir()
	env := s.Env().With(envfile.APIURL, "https://127.0.0.1:8001").With(envfile.Token, bundleToken)
	must(t, os.WriteFile(filepath.Join(dir, "node-agent.env"), env.Render(), 0o600))
	directory, err := identity.ReadBundle(dir)
	must(t, err)
	for name, b := range map[string]*identity.Bundle{"an archive": w.archive(nil), "a directory": directory} {
		must(t, s.InstallBundle(b))
		w.close(s)
		s = w.open()
		if now, _ := s.Node(); now.ProfileAPI != "" || now.ProfileFingerprint != before.ProfileFingerprint {
			t.Errorf("after %s the host is %+v, was %+v", name, now, before)
		}
		must(t, s.RestoreFormer())
		if now, _ := s.Node(); now.ProfileAPI != before.ProfileAPI || now.ProfileAPIOf != before.ProfileAPIOf {
			t.Errorf("after %s was taken back the host is %+v, was %+v", name, now, before)
		}
	}
}

// TestARenewalLeavesTheKeyOfABundlesToken: the reply to a bundle's token was lost, and the certificate held is renewed
// before the operator installs the same bundle again. The token is sent with the key that it was sent with: with
// another one it would count as stolen, and the node would be held.
func TestARenewalLeavesTheKeyOfABundlesToken(t *testing.T) {
	testkit.IO(t)
	w := newWorld(t)
	s := w.open()
	defer func() { w.close(s) }()
	w.enrolled(s)
	must(t, s.InstallBundle(w.archive(nil)))
	sent, err := s.PendingKey()
	must(t, err)
	renewal, err := s.RenewalKey()
	must(t, err)
	must(t, s.StoreIssued(w.chain(renewal), secondRecovery))
	must(t, s.DropRenewalKey())
	must(t, s.InstallBundle(w.archive(nil)))
	again, err := s.PendingKey()
	must(t, err)
	if !sent.Public().(*ecdsa.PublicKey).Equal(again.Public()) {
		t.Error("the bundle's token would be sent with another key")
	}
}
