package agent_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/gpuaas/mesh/agent"
	"github.com/gpuaas/mesh/agent/backoff"
	"github.com/gpuaas/mesh/agent/identity/envfile"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/recoverykey"
	"github.com/gpuaas/mesh/internal/testkit"
)

// deny has every open refused from now on.
func (m *mesh) deny(reason commonv1.Reason) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.denial = fault.ToDenial(fault.New(reason, ""), "")
}

func (m *mesh) lastHello() *nodev1.Hello {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.hellos[len(m.hellos)-1]
}

// recoveries returns the requests with a recovery token.
func (m *mesh) recoveries() []*recoveryv1.EnrollRequest {
	m.mu.Lock()
	defer m.mu.Unlock()
	var out []*recoveryv1.EnrollRequest
	for _, r := range m.enrols {
		if envfile.IsRecoveryToken(r.GetToken()) {
			out = append(out, r)
		}
	}
	return out
}

// diagnosed waits until the host has as many records of a code, and returns the detail of the last.
func diagnosed(t *testing.T, cfg agent.Config, code commonv1.DiagnosticCode, times int64) string {
	t.Helper()
	detail := ""
	spelled := strings.ToLower(strings.TrimPrefix(code.String(), "DIAGNOSTIC_CODE_"))
	testkit.Eventually(t, testkit.Patience, func() error {
		entries, err := agent.Diagnostics(cfg.StateDir, time.Now())
		seen := int64(0)
		for _, e := range entries {
			if e.Code == spelled {
				seen, detail = seen+e.Count, e.Detail
			}
		}
		if seen < times {
			return errors.Join(err, fmt.Errorf("%d records of %s among %v", seen, spelled, entries))
		}
		return err
	})
	return detail
}

// TestARefusedIdentityRecoversByItself checks that an agent whose identity is refused recovers as the same node
// instance, with its join state and its ledger, and reports what it has taken.
func TestARefusedIdentityRecoversByItself(t *testing.T) {
	m := newMesh(t)
	cfg := config(t.TempDir())
	cfg.OpsListen = "127.0.0.1:0"
	enrolled(t, m, cfg)
	a := open(t, cfg)
	end, _ := run(t, a)
	m.wait("admitted")
	before := m.lastHello()
	m.mu.Lock()
	m.lifts = true
	m.mu.Unlock()
	m.deny(commonv1.Reason_REASON_CERTIFICATE_EXPIRED)
	m.cut()
	m.wait("admitted")
	after := m.lastHello()
	if m.instances != 1 || after.GetNodeInstanceId() != before.GetNodeInstanceId() ||
		after.GetLedgerId() != before.GetLedgerId() || len(after.GetJoinState()) != 1 {
		t.Errorf("%d instances; hello before %v, after %v", m.instances, before, after)
	}
	requests := m.recoveries()
	if len(requests) != 1 || requests[0].GetToken() != "grt_1" || len(requests[0].GetJoinState()) != 1 ||
		requests[0].GetCorrelationId() == "" {
		t.Errorf("requests %v", requests)
	}
	if r := before.GetRecovery(); r == nil || r.GetAttempts() != 0 || r.GetLastAttemptAt() != nil {
		t.Errorf("reported before: %v", r)
	}
	if r := after.GetRecovery(); r.GetAttempts() != 1 || r.GetSuccesses() != 1 || r.GetFailures() != 0 ||
		r.GetSuppressed() != 0 || r.GetLastOutcome() != "succeeded" || r.GetLastAttemptAt() == nil {
		t.Errorf("reported after: %v", r)
	}
	metrics := fetch(t, "http://"+a.OpsAddr()+"/metrics")
	for _, line := range []string{"attempts_total 1", "successes_total 1", "failures_total 0", "suppressed_total 0"} {
		if !strings.Contains(metrics, "agent_recovery_"+line+"\n") {
			t.Errorf("no %q in the metrics", line)
		}
	}
	if err := end(); err != nil {
		t.Fatal(err)
	}
	env, err := os.ReadFile(filepath.Join(cfg.EtcDir, "node-agent.env"))
	if err != nil || !strings.Contains(string(env), "GPUAAS_ENROLLMENT_TOKEN='grt_2'") {
		t.Errorf("the token is not in the file (%v)", err)
	}
}

// TestALostCertificateIsRecovered checks that a node recovers whose key and certificate are gone while its token and
// the key of the token are there.
func TestALostCertificateIsRecovered(t *testing.T) {
	m := newMesh(t)
	cfg := config(t.TempDir())
	enrolled(t, m, cfg)
	for _, file := range []string{"cert.pem", "key.pem"} {
		if err := os.Remove(filepath.Join(cfg.EtcDir, file)); err != nil {
			t.Fatal(err)
		}
	}
	end, _ := run(t, open(t, cfg))
	m.wait("admitted")
	if sent := m.recoveries(); len(sent) != 1 || m.instances != 1 || sent[0].GetCorrelationId() == "" {
		t.Errorf("recoveries %v, %d instances", sent, m.instances)
	}
	if err := end(); err != nil {
		t.Fatal(err)
	}
}

// TestAFreshCertificateThatIsRefusedSuppresses: the agent does not recover again and again, goes on connecting, and is
// back once it is let in.
func TestAFreshCertificateThatIsRefusedSuppresses(t *testing.T) {
	m := newMesh(t)
	cfg := config(t.TempDir())
	enrolled(t, m, cfg)
	m.deny(commonv1.Reason_REASON_SERIAL_UNKNOWN)
	end, _ := run(t, open(t, cfg))
	detail := diagnosed(t, cfg, commonv1.DiagnosticCode_DIAGNOSTIC_CODE_RECOVERY_ENROLLMENT_BLOCKED, 4)
	if !strings.Contains(detail, "serial_unknown") || !strings.Contains(detail, "suppressed") {
		t.Errorf("detail %q", detail)
	}
	if n := len(m.recoveries()); n != 1 {
		t.Errorf("%d recoveries", n)
	}
	m.mu.Lock()
	m.denial = nil
	m.mu.Unlock()
	m.wait("admitted")
	if r := m.lastHello().GetRecovery(); r.GetSuppressed() < 4 || r.GetSuccesses() != 1 {
		t.Errorf("reported %v", r)
	}
	m.mu.Lock()
	m.lifts = true
	m.mu.Unlock()
	m.deny(commonv1.Reason_REASON_SERIAL_UNKNOWN) // after an admission it may recover again
	m.cut()
	m.wait("admitted")
	if n := len(m.recoveries()); n != 2 {
		t.Errorf("%d recoveries in all", n)
	}
	if err := end(); err != nil {
		t.Fatal(err)
	}
}

// TestTheLimitOfAnHourOutlivesTheProcess checks that an agent makes no more requests in an hour than the policy allows,
// across restarts.
func TestTheLimitOfAnHourOutlivesTheProcess(t *testing.T) {
	m := newMesh(t)
	cfg := config(t.TempDir())
	cfg.SlowRetry, cfg.Enrol.SlowRetry = 40*time.Millisecond, 40*time.Millisecond
	enrolled(t, m, cfg)
	m.policy = &commonv1.NodePolicy{
		HeartbeatInterval: durationpb.New(time.Second), AutoRecovery: true, RecoveryAttemptsPerHour: 3,
	}
	end, _ := run(t, open(t, cfg))
	m.wait("admitted")
	m.mu.Lock()
	m.enrolFail = fault.New(commonv1.Reason_REASON_TOKEN_EXPIRED, "", fault.RetryAfter(time.Millisecond))
	m.mu.Unlock()
	m.deny(commonv1.Reason_REASON_CERTIFICATE_EXPIRED)
	m.cut()
	diagnosed(t, cfg, commonv1.DiagnosticCode_DIAGNOSTIC_CODE_RECOVERY_TOKEN_MISSING, 3)
	detail := diagnosed(t, cfg, commonv1.DiagnosticCode_DIAGNOSTIC_CODE_RECOVERY_ENROLLMENT_BLOCKED, 3)
	if !strings.Contains(detail, "3 attempts in this hour") {
		t.Errorf("detail %q", detail)
	}
	if n := len(m.recoveries()); n != 3 {
		t.Errorf("%d requests", n)
	}
	if err := end(); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(filepath.Join(cfg.StateDir, "diagnostics.json")); err != nil {
		t.Fatal(err)
	}
	end, _ = run(t, open(t, cfg))
	diagnosed(t, cfg, commonv1.DiagnosticCode_DIAGNOSTIC_CODE_RECOVERY_ENROLLMENT_BLOCKED, 3)
	if n := len(m.recoveries()); n != 3 {
		t.Errorf("%d requests after a restart", n)
	}
	if err := end(); err != nil {
		t.Fatal(err)
	}
}

// TestRefusalsThatMeanWaitLeaveTheAttempts checks that refusals after which the agent is to wait use up no attempts:
// after an outage of what the enrolment listener needs the node is back, however many attempts it made.
func TestRefusalsThatMeanWaitLeaveTheAttempts(t *testing.T) {
	m := newMesh(t)
	cfg := config(t.TempDir())
	cfg.Enrol.Backoff = backoff.Policy{Base: time.Millisecond, Cap: 2 * time.Millisecond}
	cfg.Session.Backoff = cfg.Enrol.Backoff
	enrolled(t, m, cfg)
	m.enrolFail = fault.New(commonv1.Reason_REASON_UNAVAILABLE, "", fault.RetryAfter(time.Millisecond))
	m.lifts = true
	m.deny(commonv1.Reason_REASON_CERTIFICATE_EXPIRED)
	end, _ := run(t, open(t, cfg))
	testkit.Eventually(t, testkit.Patience, func() error {
		if n := len(m.recoveries()); n < 20 {
			return fmt.Errorf("%d recoveries", n)
		}
		return nil
	})
	m.mu.Lock()
	m.enrolFail = nil
	m.mu.Unlock()
	m.wait("admitted")
	if r := m.lastHello().GetRecovery(); r.GetFailures() < 20 || r.GetSuccesses() != 1 || r.GetSuppressed() != 0 {
		t.Errorf("reported %v", r)
	}
	if err := end(); err != nil {
		t.Fatal(err)
	}
}

// withoutTokens returns an agent's mesh and its configuration, after a session in which it was told that the policy
// leaves recovery to operators.
func withoutTokens(t *testing.T) (*mesh, agent.Config) {
	t.Helper()
	m := newMesh(t)
	cfg := config(t.TempDir())
	enrolled(t, m, cfg)
	m.policy = &commonv1.NodePolicy{HeartbeatInterval: durationpb.New(time.Second)}
	end, _ := run(t, open(t, cfg))
	m.wait("admitted")
	if err := end(); err != nil {
		t.Fatal(err)
	}
	return m, cfg
}

// TestWhereThePolicyIsOffOnlyAnOperatorRecovers: the agent remembers the policy, asks once whether it is still off, and
// takes an operator's token.
func TestWhereThePolicyIsOffOnlyAnOperatorRecovers(t *testing.T) {
	m, cfg := withoutTokens(t)
	m.enrolFail = fault.New(commonv1.Reason_REASON_AUTO_RECOVERY_OFF, "")
	m.deny(commonv1.Reason_REASON_CERTIFICATE_EXPIRED)
	end, _ := run(t, open(t, cfg))
	detail := diagnosed(t, cfg, commonv1.DiagnosticCode_DIAGNOSTIC_CODE_RECOVERY_ENROLLMENT_BLOCKED, 3)
	if !strings.Contains(detail, "node.auto_recovery") || len(m.recoveries()) != 1 {
		t.Errorf("%d recoveries, detail %q", len(m.recoveries()), detail)
	}
	m.mu.Lock()
	m.denial, m.enrolFail = nil, nil
	m.instance = "forces the host to enrol anew"
	m.mu.Unlock()
	setToken(t, cfg, "gbt_another_token_of_an_operator")
	m.wait("admitted")
	if m.instances != 2 {
		t.Errorf("%d enrolments", m.instances)
	}
	if err := end(); err != nil {
		t.Fatal(err)
	}
}

// TestAPolicyThatIsOnAgainIsHeardOf: an agent that was told that it is off, and has no session since, comes back.
func TestAPolicyThatIsOnAgainIsHeardOf(t *testing.T) {
	m, cfg := withoutTokens(t)
	m.lifts = true // the certificate that a recovery brings is accepted
	m.deny(commonv1.Reason_REASON_CERTIFICATE_EXPIRED)
	end, _ := run(t, open(t, cfg))
	m.wait("admitted")
	if n := len(m.recoveries()); n != 1 || m.instances != 1 {
		t.Errorf("%d recoveries, %d enrolments", n, m.instances)
	}
	if err := end(); err != nil {
		t.Fatal(err)
	}
}

// TestAnUntrustedWayToEnrolmentIsTriedAsOftenAsThePolicyAllows: the certificate has ended and the trust that is pinned
// for enrolment is of another issuer. No request is sent, and the attempts of an hour come to an end.
func TestAnUntrustedWayToEnrolmentIsTriedAsOftenAsThePolicyAllows(t *testing.T) {
	const most = 6
	m, cfg, other := dwelling(t, most)
	cfg.SlowRetry = 40 * time.Millisecond
	put(t, cfg, "recovery-ca-bundle.crt", other)
	m.deny(commonv1.Reason_REASON_CERTIFICATE_EXPIRED)
	end, _ := run(t, open(t, cfg))
	detail := diagnosed(t, cfg, wayBlocked, most+3)
	if !strings.Contains(detail, "6 attempts in this hour") {
		t.Errorf("detail %q", detail)
	}
	if n := len(m.recoveries()); n != 0 {
		t.Errorf("%d requests reached enrolment", n)
	}
	m.mu.Lock()
	m.denial = nil
	m.mu.Unlock()
	m.wait("admitted")
	if r := m.lastHello().GetRecovery(); r.GetAttempts() != most || r.GetFailures() != most || r.GetSuppressed() < 3 ||
		r.GetLastOutcome() != "server_tls_untrusted" {
		t.Errorf("reported %v", r)
	}
	if err := end(); err != nil {
		t.Fatal(err)
	}
}

// setToken writes a token into node-agent.env; an empty one removes it.
func setToken(t *testing.T, cfg agent.Config, token string) {
	t.Helper()
	path := filepath.Join(cfg.EtcDir, "node-agent.env")
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	env, err := envfile.Parse(data)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, env.With(envfile.Token, token).Render(), 0o600); err != nil {
		t.Fatal(err)
	}
}

// TestAnOperatorsTokenLeftBehindKeepsNoNodeAway checks that after the refusal of an operator's old token the recovery
// token is used.
func TestAnOperatorsTokenLeftBehindKeepsNoNodeAway(t *testing.T) {
	m := newMesh(t)
	cfg := config(t.TempDir())
	enrolled(t, m, cfg)
	m.refused = "gbt_an_old_token_of_an_operator"
	file := filepath.Join(cfg.EtcDir, "node-agent.env")
	env, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, append(env, envfile.Token+"="+m.refused+"\n"...), 0o600); err != nil {
		t.Fatal(err)
	}
	m.lifts = true
	m.deny(commonv1.Reason_REASON_CERTIFICATE_EXPIRED)
	end, _ := run(t, open(t, cfg))
	m.wait("admitted")
	if n := len(m.recoveries()); n != 1 || m.instances != 1 {
		t.Errorf("%d recoveries, %d instances", n, m.instances)
	}
	if err := end(); err != nil {
		t.Fatal(err)
	}
}

// claims returns the requests that tell of a missing token.
func (m *mesh) claims() []*recoveryv1.TokenMissing {
	m.mu.Lock()
	defer m.mu.Unlock()
	var out []*recoveryv1.TokenMissing
	for _, r := range m.enrols {
		if claim := r.GetTokenMissing(); claim != nil {
			out = append(out, claim)
		}
	}
	return out
}

// TestALossIsReportedUntilEnrolmentHasTakenNote checks that the agent reports a loss again after an answer of a build
// that does not know the request, or of one that is busy, and not after the answer that accepts the report.
func TestALossIsReportedUntilEnrolmentHasTakenNote(t *testing.T) {
	m := newMesh(t)
	cfg := config(t.TempDir())
	cfg.SlowRetry, cfg.Enrol.SlowRetry = 40*time.Millisecond, 40*time.Millisecond
	enrolled(t, m, cfg)
	setToken(t, cfg, "")
	m.reportFails = []commonv1.Reason{
		commonv1.Reason_REASON_RECORDS_MISSING, commonv1.Reason_REASON_INVALID_ARGUMENT, commonv1.Reason_REASON_UNAVAILABLE,
	}
	m.deny(commonv1.Reason_REASON_CERTIFICATE_EXPIRED)
	end, _ := run(t, open(t, cfg))
	const code = commonv1.DiagnosticCode_DIAGNOSTIC_CODE_RECOVERY_TOKEN_MISSING
	diagnosed(t, cfg, code, 7)
	if claims := m.claims(); len(claims) != 4 {
		t.Errorf("enrolment was told %d times: %v", len(claims), claims)
	}
	if err := end(); err != nil {
		t.Fatal(err)
	}
}

// TestWithoutATokenTheAgentWaitsForOne: each kind of loss is recorded, enrolment is told once if a certificate proves
// which node this is, nothing else is sent, and an operator's token in the file ends it.
func TestWithoutATokenTheAgentWaitsForOne(t *testing.T) {
	for name, lose := range map[string]func(t *testing.T, cfg agent.Config){
		"no token": func(t *testing.T, cfg agent.Config) { t.Helper(); setToken(t, cfg, "") },
		"no key": func(t *testing.T, cfg agent.Config) {
			t.Helper()
			if err := os.Remove(filepath.Join(cfg.StateDir, "recovery-key.pem")); err != nil {
				t.Fatal(err)
			}
		},
		"no state": func(t *testing.T, cfg agent.Config) {
			t.Helper()
			if err := os.RemoveAll(cfg.StateDir); err != nil {
				t.Fatal(err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMesh(t)
			cfg := config(t.TempDir())
			enrolled(t, m, cfg)
			lose(t, cfg)
			m.deny(commonv1.Reason_REASON_CERTIFICATE_EXPIRED)
			end, _ := run(t, open(t, cfg))
			diagnosed(t, cfg, commonv1.DiagnosticCode_DIAGNOSTIC_CODE_RECOVERY_TOKEN_MISSING, 3)
			if n := len(m.recoveries()); n != 0 {
				t.Errorf("%d recoveries", n)
			}
			claims := m.claims()
			if want := map[bool]int{true: 0, false: 1}[name == "no state"]; len(claims) != want {
				t.Fatalf("enrolment was told %d times: %v", len(claims), claims)
			}
			for _, c := range claims {
				err := recoverykey.VerifyMissing(c.GetPublicKey(), m.nodeID, c.GetSerial(), c.GetProof())
				if err != nil || c.GetNodeId() != m.nodeID || c.GetKeyLost() != (name == "no key") {
					t.Errorf("enrolment was told %v, %v", c, err)
				}
			}
			m.mu.Lock()
			m.denial = nil
			m.instance = "forces the host to enrol anew"
			m.mu.Unlock()
			setToken(t, cfg, "gbt_another_token_of_an_operator")
			m.wait("admitted")
			if err := end(); err != nil {
				t.Fatal(err)
			}
		})
	}
}
