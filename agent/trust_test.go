package agent_test

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/gpuaas/mesh/agent"
	"github.com/gpuaas/mesh/agent/agenttest"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/testkit"
)

const (
	tlsUntrusted = commonv1.DiagnosticCode_DIAGNOSTIC_CODE_SERVER_TLS_UNTRUSTED
	wayBlocked   = commonv1.DiagnosticCode_DIAGNOSTIC_CODE_RECOVERY_ENROLLMENT_BLOCKED
)

// dwelling returns a mesh, the configuration of an agent that has its policy, with a dwell of trust of a second and at
// most so many attempts an hour, and the root of another issuer.
func dwelling(t *testing.T, attempts int32) (*mesh, agent.Config, []byte) {
	t.Helper()
	m := newMesh(t)
	cfg := config(t.TempDir())
	cfg.TrustEvery = 50 * time.Millisecond
	m.policy = &commonv1.NodePolicy{
		HeartbeatInterval: durationpb.New(time.Second), AutoRecovery: true, RecoveryAttemptsPerHour: attempts,
		TrustDwell: durationpb.New(time.Second),
	}
	enrolled(t, m, cfg)
	end, _ := run(t, open(t, cfg))
	m.wait("admitted")
	if err := end(); err != nil {
		t.Fatal(err)
	}
	other, err := agenttest.NewAuthority("other", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	return m, cfg, other.PEM()
}

func put(t *testing.T, cfg agent.Config, file string, content []byte) {
	t.Helper()
	path := filepath.Join(cfg.EtcDir, file)
	tmp := path + ".new"
	if err := os.WriteFile(tmp, content, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(tmp, path); err != nil {
		t.Fatal(err)
	}
}

// TestPinnedTrustForEnrolmentRepairsThatForTheNodeAPI checks that trust pinned for enrolment repairs the trust for the
// node API after the dwell and not before, and that the node comes back as the same node instance.
func TestPinnedTrustForEnrolmentRepairsThatForTheNodeAPI(t *testing.T) {
	for name, broken := range map[string][]byte{"of another issuer": nil, "unreadable": []byte("x")} {
		t.Run(name, func(t *testing.T) {
			m, cfg, other := dwelling(t, 6)
			if broken == nil {
				broken = other
			}
			put(t, cfg, "ca-bundle.crt", broken)
			before := m.lastHello()
			began := time.Now()
			end, _ := run(t, open(t, cfg))
			m.wait("admitted")
			if took := time.Since(began); took < time.Second {
				t.Errorf("trust was bootstrapped after %s, within the dwell", took)
			}
			diagnosed(t, cfg, tlsUntrusted, 1)
			if n := len(m.recoveries()); n != 1 || m.instances != 1 ||
				m.lastHello().GetNodeInstanceId() != before.GetNodeInstanceId() {
				t.Errorf("%d recoveries, %d instances, hello %v", n, m.instances, m.lastHello())
			}
			now, err := os.ReadFile(filepath.Join(cfg.EtcDir, "ca-bundle.crt"))
			if err != nil || !bytes.Equal(now, m.services.PEM()) {
				t.Errorf("bundle %s, %v", now, err)
			}
			record, err := os.ReadFile(filepath.Join(cfg.StateDir, "recovery.json"))
			if err != nil || bytes.Contains(record, []byte("untrusted_since")) {
				t.Errorf("the dwell is not over: %s, %v", record, err)
			}
			if err := end(); err != nil {
				t.Fatal(err)
			}
		})
	}
}

// TestTrustThatIsStaleOnBothWaysIsBlocked checks that an agent whose trust is stale for both endpoints sends no request
// without trust, makes a bounded number of attempts, and recovers once trust is put back on the host.
func TestTrustThatIsStaleOnBothWaysIsBlocked(t *testing.T) {
	m, cfg, other := dwelling(t, 2)
	put(t, cfg, "ca-bundle.crt", other)
	put(t, cfg, "recovery-ca-bundle.crt", other)
	end, _ := run(t, open(t, cfg))
	detail := diagnosed(t, cfg, wayBlocked, 1)
	if !strings.Contains(detail, "neither") {
		t.Errorf("detail %q", detail)
	}
	testkit.Eventually(t, testkit.Patience, func() error {
		return errorUnless(strings.Contains(diagnosed(t, cfg, wayBlocked, 1), "2 attempts in this hour"))
	})
	if n := len(m.enrols); n != 1 { // that of the operator's bundle
		t.Errorf("%d requests reached enrolment", n)
	}
	put(t, cfg, "ca-bundle.crt", m.services.PEM())
	m.wait("admitted")
	if r := m.lastHello().GetRecovery(); r.GetAttempts() != 2 || r.GetFailures() != 2 || r.GetSuppressed() < 1 ||
		r.GetLastOutcome() != "server_tls_untrusted" {
		t.Errorf("reported %v", r)
	}
	if err := end(); err != nil {
		t.Fatal(err)
	}
}

// TestTrustThatVerifiesNothingIsNotTaken: recovery is reached, and what it gives does not verify its own endpoints.
func TestTrustThatVerifiesNothingIsNotTaken(t *testing.T) {
	m, cfg, other := dwelling(t, 6)
	m.mu.Lock()
	m.gives = func(p *commonv1.Profile) { p.CaBundlePem, p.Fingerprint, p.ApiUrl = other, "second", m.api }
	m.mu.Unlock()
	put(t, cfg, "ca-bundle.crt", other)
	end, _ := run(t, open(t, cfg))
	if detail := diagnosed(t, cfg, wayBlocked, 1); !strings.Contains(detail, "profile") {
		t.Errorf("detail %q", detail)
	}
	diagnosed(t, cfg, commonv1.DiagnosticCode_DIAGNOSTIC_CODE_PROFILE_REFUSED, 1)
	now, err := os.ReadFile(filepath.Join(cfg.StateDir, "node.json"))
	if err != nil || !bytes.Contains(now, []byte(`"profile_fingerprint": "fp"`)) {
		t.Errorf("node.json is %s, %v", now, err)
	}
	m.mu.Lock()
	m.gives = nil // the profile is repaired
	m.mu.Unlock()
	m.wait("admitted")
	if err := end(); err != nil {
		t.Fatal(err)
	}
}

// TestTrustIsLeftToOperatorsWhereThePolicySaysSo, and where no recovery token is held.
func TestTrustIsLeftToOperatorsWhereThePolicySaysSo(t *testing.T) {
	m, cfg, other := dwelling(t, 6)
	m.policy.AutoRecovery = false
	end, _ := run(t, open(t, cfg))
	m.wait("admitted")
	if err := end(); err != nil {
		t.Fatal(err)
	}
	m.enrolFail = fault.New(commonv1.Reason_REASON_AUTO_RECOVERY_OFF, "")
	put(t, cfg, "ca-bundle.crt", other)
	end, _ = run(t, open(t, cfg))
	if detail := diagnosed(t, cfg, wayBlocked, 1); !strings.Contains(detail, "node.auto_recovery") {
		t.Errorf("detail %q", detail)
	}
	if n := len(m.recoveries()); n != 1 {
		t.Errorf("%d recoveries", n)
	}
	put(t, cfg, "ca-bundle.crt", m.services.PEM())
	m.wait("admitted")
	if err := end(); err != nil {
		t.Fatal(err)
	}
}

func errorUnless(ok bool) error {
	if !ok {
		return errors.New("not yet")
	}
	return nil
}
