package recovery_test

import (
	"crypto/tls"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/gen/gpuaas/recovery/v1/recoveryv1connect"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/pki/ca"
	"github.com/gpuaas/mesh/internal/rpc/calls"
	"github.com/gpuaas/mesh/internal/rpc/rpctest"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/recovery"
)

// TestTheProfileFollowsItsFile checks that a replica sends the certificate authorities that its file has now, without a
// restart, and the former ones while the file cannot be read.
func TestTheProfileFollowsItsFile(t *testing.T) {
	api, enrolment := listen(t), listen(t)
	m := start(t, func(cfg *recovery.Config) {
		cfg.Profile.APIURL, cfg.Profile.RecoveryURL = api.Addr().String(), "https://"+enrolment.Addr().String()
	})
	m.prove(api, "nodeapi")
	m.prove(enrolment, "recovery")
	replica, url := m.client("nodeapi")
	sessions := recoveryv1connect.NewSessionServiceClient(replica, url, calls.Options(calls.Config{})...)
	fingerprint := func() string {
		t.Helper()
		opened, err := sessions.OpenSessions(m.ctx, &recoveryv1.OpenSessionsRequest{Sessions: []*recoveryv1.OpenSession{{
			SessionId: ids.New(), NodeId: ids.New(), NodeInstanceId: ids.New(), Serial: "aa",
		}}})
		if err != nil {
			t.Fatal(err)
		}
		return opened.GetProfileFingerprint()
	}
	first := fingerprint()
	former, err := os.ReadFile(m.cfg.Profile.CAFile)
	if err != nil {
		t.Fatal(err)
	}
	next, err := ca.OpenServiceCA(t.TempDir(), rpctest.TrustDomain)
	if err != nil {
		t.Fatal(err)
	}
	bundle, err := next.Bundle()
	if err != nil {
		t.Fatal(err)
	}
	put := func(text string) {
		t.Helper()
		path := write(t, filepath.Join(t.TempDir(), "next.pem"), text)
		if err := os.Rename(path, m.cfg.Profile.CAFile); err != nil {
			t.Fatal(err)
		}
	}
	until := func(check func(now string) bool) {
		t.Helper()
		testkit.Eventually(t, testkit.Patience, func() error {
			if !check(fingerprint()) {
				return errors.New("the fingerprint is another")
			}
			return nil
		})
	}
	put("no certificate")
	put(string(bundle.PEM())) // of another issuer than that of the endpoints
	testkit.Eventually(t, testkit.Patience, func() error {
		families, err := m.registry.Gatherer().Gather()
		for _, f := range families {
			if strings.HasSuffix(f.GetName(), "profile_unverified_total") && f.GetMetric()[0].GetCounter().GetValue() > 0 {
				return nil
			}
		}
		return errors.Join(errors.New("no attempt was refused"), err)
	})
	if fingerprint() != first {
		t.Error("a file that does not verify the endpoints has changed the profile")
	}
	put(string(former) + string(bundle.PEM()))
	until(func(now string) bool { return now != first })
	put(string(former))
	until(func(now string) bool { return now == first })
}

func listen(t *testing.T) net.Listener {
	t.Helper()
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = lis.Close() })
	return lis
}

// prove serves a listener that proves to be a service, and nothing else, until the test ends.
func (m *mesh) prove(lis net.Listener, service string) {
	m.t.Helper()
	cfg, err := pki.ServerTLS(m.authorities.ServerTLS(m.t, service))
	if err != nil {
		m.t.Fatal(err)
	}
	secured := tls.NewListener(lis, cfg)
	go func() {
		for {
			conn, err := secured.Accept()
			if err != nil {
				return
			}
			_, _ = conn.Read(make([]byte, 1)) // with the handshake
			_ = conn.Close()
		}
	}()
}

// Scenario: a person sets another profile, and a machine is enrolled with it by name, over the real ports.
func TestANodeIsEnrolledWithAProfileByName(t *testing.T) {
	m := start(t)
	console, url := m.client("readmodel")
	options := calls.Options(calls.Config{Asserter: m.asserter})
	people := recoveryv1connect.NewProfileServiceClient(console, url, options...)
	nodes := recoveryv1connect.NewIdentityServiceClient(console, url, options...)
	set := &recoveryv1.SetProfileRequest{
		Name: "edge", ApiUrl: m.service.EnrollAddr(), RecoveryUrl: "https://" + m.service.EnrollAddr(),
		CaBundlePem: m.authorities.ServiceRoots.PEM(), Reason: "the second site",
	}
	if _, err := people.SetProfile(m.asPerson("operator"), set); !fault.Has(err, unverified) {
		t.Fatalf("recovery answers at the address of the node API: %v", err)
	}
	if _, err := people.SetProfile(m.asPerson("viewer"), set); !fault.Has(err,
		commonv1.Reason_REASON_PERMISSION_DENIED) {
		t.Fatalf("a viewer sets a profile: %v", err)
	}
	lis := listen(t)
	m.prove(lis, "nodeapi")
	set.ApiUrl = lis.Addr().String()
	edge, err := people.SetProfile(m.asPerson("operator"), set)
	if err != nil {
		t.Fatal(err)
	}
	issue := func(name, profile string) (*recoveryv1.IssueBootstrapResponse, error) {
		return nodes.IssueBootstrap(m.asPerson("operator"), &recoveryv1.IssueBootstrapRequest{Name: name, Profile: profile})
	}
	if _, err := issue("node-1", "edge"); !fault.Has(err, commonv1.Reason_REASON_PROFILE_UNKNOWN) {
		t.Fatalf("a profile is given that is announced alone: %v", err)
	}
	if _, err := people.ActivateProfile(m.asPerson("operator"), &recoveryv1.ActivateProfileRequest{
		Name: "edge", Version: edge.GetProfile().GetProfile().GetVersion(), Reason: "it is up",
	}); err != nil {
		t.Fatal(err)
	}
	bundle, err := issue("node-1", "edge")
	if err != nil || bundle.GetProfile().GetApiUrl() != set.GetApiUrl() {
		t.Fatalf("%v %v", bundle, err)
	}
	if other, err := issue("node-2", ""); err != nil || other.GetProfile().GetName() != "test" {
		t.Fatalf("%v %v", other, err)
	}
	again, err := issue("node-1", "") // it keeps its profile
	if err != nil || again.GetProfile().GetName() != "edge" {
		t.Fatalf("%v %v", again, err)
	}
	machine := recoveryv1connect.NewEnrollmentServiceClient(m.authorities.Client(t, "recovery", nil),
		"https://"+m.service.EnrollAddr(), calls.Options(calls.Config{})...)
	key, err := pki.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	csr, err := pki.NewAnonymousCSR(key)
	if err != nil {
		t.Fatal(err)
	}
	enrolled, err := machine.Enroll(m.ctx, &recoveryv1.EnrollRequest{Token: again.GetToken(), Csr: csr})
	if err != nil || enrolled.GetProfile().GetFingerprint() != edge.GetProfile().GetProfile().GetFingerprint() ||
		enrolled.GetProfile().GetVersion() != 1 {
		t.Fatalf("%v %v", enrolled, err)
	}
	for _, e := range testkit.Events(t, m.db.Pool(pg.RoleRecovery), `kind = 'node_identity.changed'`) {
		n := &recoveryv1.NodeIdentity{}
		if err := e.Decode(n); err != nil || n.GetName() == "node-1" && n.GetProfile() != "edge" {
			t.Errorf("%v %v", n, err)
		}
	}
}

const unverified = commonv1.Reason_REASON_PROFILE_UNVERIFIED
