package agent_test

import (
	"crypto/tls"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/mesh/agent"
	"github.com/gpuaas/mesh/agent/agenttest"
	"github.com/gpuaas/mesh/agent/identity"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
)

// profile returns a version of the profile that enrolment gives, with the node API at an address.
func (m *mesh) profile(version int64, fingerprint, api string) *commonv1.Profile {
	return &commonv1.Profile{
		Name: "test", Version: version, Fingerprint: fingerprint, ApiUrl: api, RecoveryUrl: m.enrolURL,
		CaBundlePem: m.services.PEM(), RecoveryCaBundlePem: m.services.PEM(),
	}
}

// offerProfile sends an offer over the last stream.
func (m *mesh) offerProfile(profile *commonv1.Profile) {
	m.t.Helper()
	m.send(&nodev1.ConnectResponse{Frame: &nodev1.ConnectResponse_ProfileOffer{
		ProfileOffer: &nodev1.ProfileOffer{Profile: profile},
	}})
}

func (m *mesh) answer() *nodev1.ProfileAnswer {
	m.t.Helper()
	select {
	case answer := <-m.answers:
		return answer
	case <-time.After(time.Minute):
		m.t.Fatal("no answer to the profile in time")
		return nil
	}
}

// files returns what of a profile is on a host.
func files(t *testing.T, cfg agent.Config) string {
	t.Helper()
	var all strings.Builder
	for _, path := range []string{
		filepath.Join(cfg.EtcDir, "node-agent.env"), filepath.Join(cfg.EtcDir, "ca-bundle.crt"),
		filepath.Join(cfg.EtcDir, "recovery-ca-bundle.crt"), filepath.Join(cfg.StateDir, "node.json"),
	} {
		data, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		all.Write(data)
	}
	return all.String()
}

// TestAnOfferedProfileIsTakenAndDialled: the session moves to the new endpoint without a gap, and a later start begins
// there; what is older than the profile held changes nothing.
func TestAnOfferedProfileIsTakenAndDialled(t *testing.T) {
	m := newMesh(t)
	cfg := config(t.TempDir())
	enrolled(t, m, cfg)
	end, _ := run(t, open(t, cfg))
	m.wait("admitted")
	moved := m.serveAnother()
	m.offerProfile(m.profile(2, "second", moved))
	if answer := m.answer(); answer.GetRefused() != nil || answer.GetFingerprint() != "second" ||
		answer.GetProfile().GetFingerprint() != "second" || answer.GetProfile().GetApiHost() != moved {
		t.Fatalf("answer %v", answer)
	}
	m.wait("admitted")
	if hello := m.lastHello(); hello.GetReplacesNonce() == "" || hello.GetProfile().GetFingerprint() != "second" {
		t.Errorf("hello %v", hello)
	}
	kept := files(t, cfg)
	for _, old := range []*commonv1.Profile{m.profile(1, "fp", m.api), m.profile(2, "other", m.api)} {
		m.offerProfile(old)
		answer := m.answer()
		if answer.GetRefused().GetReason() != commonv1.Reason_REASON_PRECONDITION_FAILED ||
			answer.GetProfile().GetFingerprint() != "second" {
			t.Errorf("answer to version %d: %v", old.GetVersion(), answer)
		}
	}
	m.offerProfile(m.profile(2, "second", moved)) // the same again, as after a lost answer
	if answer := m.answer(); answer.GetRefused() != nil || answer.GetProfile().GetFingerprint() != "second" {
		t.Errorf("the same once more: %v", answer)
	}
	if now := files(t, cfg); now != kept {
		t.Errorf("the files changed:\n%s\nwere\n%s", now, kept)
	}
	if _, err := os.Stat(filepath.Join(cfg.StateDir, "former-profile.json")); !os.IsNotExist(err) {
		t.Errorf("the former profile is kept though the new one is confirmed: %v", err)
	}
	if err := end(); err != nil {
		t.Fatal(err)
	}
	end, _ = run(t, open(t, cfg))
	m.wait("admitted")
	if hello := m.lastHello(); hello.GetProfile().GetApiHost() != moved {
		t.Errorf("after a restart: %v", hello.GetProfile())
	}
	if err := end(); err != nil {
		t.Fatal(err)
	}
}

// TestAProfileOfAnotherNameIsTaken checks that an agent takes a profile of another name whatever its number: the
// control plane decides which profile a node has, and the numbers of two names cannot be compared.
func TestAProfileOfAnotherNameIsTaken(t *testing.T) {
	m := newMesh(t)
	cfg := config(t.TempDir())
	enrolled(t, m, cfg)
	end, _ := run(t, open(t, cfg))
	m.wait("admitted")
	m.offerProfile(m.profile(7, "second", m.api))
	if answer := m.answer(); answer.GetRefused() != nil || answer.GetProfile().GetName() != "test" {
		t.Fatalf("answer %v", answer)
	}
	moved := m.profile(1, "third", m.serveAnother())
	moved.Name = "edge"
	m.offerProfile(moved)
	if answer := m.answer(); answer.GetRefused() != nil || answer.GetProfile().GetFingerprint() != "third" ||
		answer.GetProfile().GetName() != "edge" {
		t.Fatalf("answer %v", answer)
	}
	m.wait("admitted")
	if hello := m.lastHello(); hello.GetProfile().GetName() != "edge" {
		t.Errorf("hello %v", hello)
	}
	if err := end(); err != nil {
		t.Fatal(err)
	}
}

// TestAProfileThatIsNotVerifiedIsRefused checks that a profile that is not verified is refused with a reason and a
// diagnostic, and that nothing of it is stored.
func TestAProfileThatIsNotVerifiedIsRefused(t *testing.T) {
	m := newMesh(t)
	cfg := config(t.TempDir())
	enrolled(t, m, cfg)
	end, _ := run(t, open(t, cfg))
	m.wait("admitted")
	other, err := agenttest.NewAuthority("other", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	silent := m.listen()
	closed := silent.Addr().String()
	if err := silent.Close(); err != nil {
		t.Fatal(err)
	}
	kept, refused := files(t, cfg), int64(0)
	const unverified, invalid = commonv1.Reason_REASON_PROFILE_UNVERIFIED, commonv1.Reason_REASON_INVALID_ARGUMENT
	for _, tt := range []struct {
		name   string
		reason commonv1.Reason
		change func(*commonv1.Profile)
		want   string
	}{
		{"trust of another issuer", unverified, func(p *commonv1.Profile) { p.CaBundlePem = other.PEM() }, "node API"},
		{
			"trust of another issuer for enrolment", unverified,
			func(p *commonv1.Profile) { p.RecoveryCaBundlePem = other.PEM() }, "enrolment",
		},
		{"nothing listens", unverified, func(p *commonv1.Profile) { p.ApiUrl = closed }, "unreachable"},
		{"no endpoint", unverified, func(p *commonv1.Profile) { p.ApiUrl = "" }, "malformed"},
		{"another service", unverified, func(p *commonv1.Profile) { p.TerminalUrl = m.enrolURL }, "another server"},
		{"trust that is none", unverified, func(p *commonv1.Profile) { p.CaBundlePem = []byte("x") }, "malformed"},
		{"without a fingerprint", invalid, func(p *commonv1.Profile) { p.Fingerprint = "" }, "fingerprint"},
		{"with a huge one", invalid, func(p *commonv1.Profile) { p.Fingerprint = strings.Repeat("é", 1000) }, "fingerprint"},
	} {
		profile := proto.CloneOf(m.profile(2, "second", m.serveAnother()))
		tt.change(profile)
		m.offerProfile(profile)
		answer := m.answer()
		if answer.GetRefused().GetReason() != tt.reason || !strings.Contains(answer.GetRefused().GetMessage(), tt.want) ||
			answer.GetProfile().GetFingerprint() != "fp" || len(answer.GetFingerprint()) > 128 {
			t.Errorf("%s: answer %v", tt.name, answer)
		}
		refused++
		diagnosed(t, cfg, commonv1.DiagnosticCode_DIAGNOSTIC_CODE_PROFILE_REFUSED, refused)
		if now := files(t, cfg); now != kept {
			t.Errorf("%s changed the files:\n%s\nwere\n%s", tt.name, now, kept)
		}
	}
	if err := end(); err != nil {
		t.Fatal(err)
	}
}

// TestAProfileOverWhichNoSessionIsAdmittedIsGivenUp: its endpoints are verified, and its node API admits no node. The
// former profile is back after the bound, also over a restart, and the same offer is refused then.
func TestAProfileOverWhichNoSessionIsAdmittedIsGivenUp(t *testing.T) {
	m := newMesh(t)
	cfg := config(t.TempDir())
	cfg.ProfileWithin = 400 * time.Millisecond
	enrolled(t, m, cfg)
	pair := m.pair("nodeapi")
	dead, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{
		MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{pair}, NextProtos: []string{"h2"},
	})
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan struct{})
	go func() {
		defer close(served)
		for {
			conn, err := dead.Accept()
			if err != nil {
				return
			}
			_ = conn.(*tls.Conn).HandshakeContext(t.Context())
			_ = conn.Close()
		}
	}()
	t.Cleanup(func() { _ = dead.Close(); <-served })
	end, _ := run(t, open(t, cfg))
	m.wait("admitted")
	kept := files(t, cfg)
	offer := m.profile(2, "second", dead.Addr().String())
	m.offerProfile(offer)
	if answer := m.answer(); answer.GetRefused() != nil {
		t.Fatalf("answer %v", answer)
	}
	answer := m.answer()
	if answer.GetRefused().GetReason() != commonv1.Reason_REASON_PROFILE_UNVERIFIED ||
		answer.GetFingerprint() != "second" || answer.GetProfile().GetFingerprint() != "fp" {
		t.Errorf("answer after the bound: %v", answer)
	}
	m.wait("admitted") // over the former one
	same := func(what string) {
		t.Helper()
		if now := files(t, cfg); sorted(now) != sorted(kept) {
			t.Errorf("%s: the files are\n%s\nwere\n%s", what, now, kept)
		}
	}
	same("after the bound")
	m.offerProfile(offer)
	if answer := m.answer(); answer.GetRefused().GetReason() != commonv1.Reason_REASON_PROFILE_UNVERIFIED {
		t.Errorf("the same offer again: %v", answer)
	}
	if err := end(); err != nil {
		t.Fatal(err)
	}

	// A process that ends before the bound leaves the former one for the next to go back to.
	store, err := identity.Open(identity.Dirs{Etc: cfg.EtcDir, State: cfg.StateDir})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := store.StoreProfile(offer); err != nil {
		t.Fatal(err)
	}
	if err := store.Close(); err != nil {
		t.Fatal(err)
	}
	end, _ = run(t, open(t, cfg))
	m.wait("admitted")
	same("after a restart")
	diagnosed(t, cfg, commonv1.DiagnosticCode_DIAGNOSTIC_CODE_PROFILE_REFUSED, 3)
	if err := end(); err != nil {
		t.Fatal(err)
	}
}

// sorted returns the lines of a text in order.
func sorted(text string) string {
	lines := strings.Split(text, "\n")
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}
