package enrol_test

import (
	"bytes"
	"crypto/ecdsa"
	"encoding/base64"
	"encoding/json"
	"strings"
	"sync"
	"testing"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/pki/ca"
	"github.com/gpuaas/mesh/internal/recoverykey"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/recovery/enrol"
	"github.com/gpuaas/mesh/services/recovery/identity"
)

// TestARecoveryTokenIsOfferedAndConfirmed: the token of a renewal counts from the session that is ready on that
// certificate, and those before it end then.
func TestARecoveryTokenIsOfferedAndConfirmed(t *testing.T) {
	k := newKit(t)
	m := k.machine()
	m.took(m.mustEnroll(k.bootstrap("node-1").Token, k.csr()))
	if got := m.states(); got != "issued" {
		t.Fatalf("after enrolment: %s", got)
	}
	m.admit()
	if got := m.states(); got != "issued+" {
		t.Fatalf("after admission: %s", got)
	}
	first, csr := m.token, k.csr()
	renewed, err := k.enroller.Renew(k.ctx, m.renewal(csr))
	if err != nil || renewed.RecoveryToken == "" || renewed.RecoveryToken == first {
		t.Fatalf("renewal: %v", err)
	}
	again, err := k.enroller.Renew(k.ctx, m.renewal(csr)) // its answer was lost
	if err != nil || again.RecoveryToken == "" || again.Serial.Serial != renewed.Serial.Serial {
		t.Fatalf("renewal again: %v", err)
	}
	if got := m.states(); got != "issued+ issued" {
		t.Fatalf("after the renewal: %s", got)
	}
	m.serial, m.token = again.Serial.Serial, again.RecoveryToken
	m.admit()
	if got := m.states(); got != "revoked:replaced+ issued+" {
		t.Fatalf("after a session on the next: %s", got)
	}
	old := *m
	old.token = first
	_, err = old.recover(k.csr())
	k.refused(err, commonv1.Reason_REASON_TOKEN_CONSUMED)
	if r := k.record(m.node); r.Alarm != "" || r.State != commonv1.NodeIdentityState_NODE_IDENTITY_STATE_ACTIVE {
		t.Fatalf("an old token put the node on hold: %+v", r)
	}
	m.mustRecover(k.csr())
	// An agent without a recovery key gets no token.
	req := m.renewal(k.csr())
	m.admit()
	req.SessionId, req.Serial, req.RecoveryPublicKey = m.session, m.serial, nil
	if renewed, err := k.enroller.Renew(k.ctx, req); err != nil || renewed.RecoveryToken != "" {
		t.Fatalf("without a key: %q %v", renewed.RecoveryToken, err)
	}
}

// TestBothTokensAreAcceptedUntilTheNextCounts: whichever of the two the node uses, both are used, and another key that
// presents the other one is an alarm.
func TestBothTokensAreAcceptedUntilTheNextCounts(t *testing.T) {
	for _, older := range []bool{true, false} {
		k := newKit(t)
		m := k.enrolled("node-1")
		renewed, err := k.enroller.Renew(k.ctx, m.renewal(k.csr()))
		if err != nil {
			t.Fatal(err)
		}
		other := *m
		if older {
			other.token = renewed.RecoveryToken
		} else {
			m.token = renewed.RecoveryToken
		}
		csr := k.csr()
		m.mustRecover(csr)
		if got := m.states(); strings.Count(got, "used") != 2 {
			t.Fatalf("after the use of one: %s", got)
		}
		// The same key with the other token: the same certificate.
		resp, err := other.recover(csr)
		if err != nil || k.serialOf(resp) != m.serial {
			t.Fatalf("the other token with the same key: %v", err)
		}
		_, err = other.recover(k.csr())
		k.refused(err, commonv1.Reason_REASON_TOKEN_CONSUMED)
		if r := k.record(m.node); r.Alarm != identity.AlarmTokenReuse {
			t.Fatalf("no alarm: %+v", r)
		}
	}
}

// TestRecoveryKeepsTheNodeOfTheSameHost: with its join state a node keeps its node instance, its generation and its
// gate; without it is a new node instance.
func TestRecoveryKeepsTheNodeOfTheSameHost(t *testing.T) {
	k := newKit(t)
	m := k.enrolled("node-1")
	before, csr := k.record(m.node), k.csr()
	resp := m.mustRecover(csr)
	r := k.record(m.node)
	if r.InstanceID != before.InstanceID || r.Issued != before.Issued || r.Confirmed != before.Confirmed ||
		r.FenceEpoch != before.FenceEpoch || r.CurrentSerial != before.CurrentSerial || r.NextSerial != m.serial ||
		resp.GetNodeInstanceId() != before.InstanceID {
		t.Fatalf("before %+v\nafter %+v", before, r)
	}
	m.admit()
	if got := m.states(); got != "used+ issued+" {
		t.Fatalf("tokens: %s", got)
	}
	m.joinState = nil // the host lost it
	m.mustRecover(k.csr())
	if r := k.record(m.node); r.InstanceID == before.InstanceID || r.Confirmed != 0 || r.FenceEpoch <= before.FenceEpoch {
		t.Fatalf("after a loss: %+v", r)
	}
	if n := k.count(`SELECT count(DISTINCT family) FROM recovery.recovery_token`); n != 1 {
		t.Fatalf("%d families", n)
	}
}

// TestRecoveryReplay: the same key gets the same certificate and a token that works; another key ends all tokens of the
// node and puts it on hold.
func TestRecoveryReplay(t *testing.T) {
	k := newKit(t)
	m := k.enrolled("node-1")
	used, csr := m.token, k.csr()
	first, err := m.recover(csr)
	if err != nil {
		t.Fatal(err)
	}
	again, err := m.recover(csr)
	if err != nil || !bytes.Equal(first.GetCertificateChainPem(), again.GetCertificateChainPem()) {
		t.Fatalf("the same key: %v", err)
	}
	m.took(again)
	m.admit()
	m.mustRecover(k.csr()) // by the token of the repeated answer
	m.admit()
	copied := *m
	copied.token = used
	_, err = copied.recover(k.csr())
	k.refused(err, commonv1.Reason_REASON_TOKEN_CONSUMED)
	r := k.record(m.node)
	if r.Alarm != identity.AlarmTokenReuse || r.State != commonv1.NodeIdentityState_NODE_IDENTITY_STATE_HELD {
		t.Fatalf("after a second key: %+v", r)
	}
	if got := m.states(); strings.Contains(got, "issued") || strings.Contains(got, "used") ||
		!strings.Contains(got, "reuse") {
		t.Fatalf("tokens: %s", got)
	}
	_, err = m.recover(k.csr())
	k.refused(err, commonv1.Reason_REASON_IDENTITY_HELD)
}

// TestAnOldGenerationRecoversNothing: a copy of an earlier state, or a disk that was put back, changes nothing and puts
// no node on hold.
func TestAnOldGenerationRecoversNothing(t *testing.T) {
	k := newKit(t)
	m := k.enrolled("node-1")
	old := *m
	m.admit()
	m.admit()
	before := k.rows()
	_, err := old.recover(k.csr())
	k.refused(err, commonv1.Reason_REASON_CLONED_IDENTITY_DETECTED)
	if k.rows() != before {
		t.Fatal("something changed")
	}
	m.mustRecover(k.csr())
}

// TestACopyThatRecoversFirstIsNoticed: a copy with all of the node's files recovers, and so the original's attempt is
// an alarm.
func TestACopyThatRecoversFirstIsNoticed(t *testing.T) {
	k := newKit(t)
	m := k.enrolled("node-1")
	copied := *m
	copied.mustRecover(k.csr())
	copied.admit()
	_, err := m.recover(k.csr())
	k.refused(err, commonv1.Reason_REASON_TOKEN_CONSUMED)
	if r := k.record(m.node); r.Alarm != identity.AlarmTokenReuse {
		t.Fatalf("%+v", r)
	}
}

// TestNothingOfARecoveryTokenChangesBeforeTheProof has every bad token refused with its reason and no change.
func TestNothingOfARecoveryTokenChangesBeforeTheProof(t *testing.T) {
	k := newKit(t)
	m, foreign := k.enrolled("node-1"), k.enrolled("node-2")
	stranger := k.machine()
	good, csr := k.csr(), k.csr()
	forging, err := pki.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	sum := sha(m.public)
	claims := func(change func(*ca.RecoveryClaims)) ca.RecoveryClaims {
		c := k.claims(m)
		change(&c)
		return c
	}
	sign := func(key *ecdsa.PrivateKey, domain string, c ca.RecoveryClaims) string {
		tokens, err := ca.NewRecoveryTokens(key, domain)
		if err != nil {
			t.Fatal(err)
		}
		text, err := tokens.Sign(c)
		if err != nil {
			t.Fatal(err)
		}
		return text
	}
	ours := func(change func(*ca.RecoveryClaims)) string {
		return sign(k.provisioner(), "mesh.test", claims(change))
	}
	same := func(*ca.RecoveryClaims) {}
	parts := strings.Split(strings.TrimPrefix(m.token, "grt_"), ".")
	none := base64.RawURLEncoding.EncodeToString([]byte(`{"alg":"none","typ":"grt+jwt","kid":"x"}`))
	invalid := commonv1.Reason_REASON_TOKEN_INVALID
	tests := []struct {
		name string
		req  *recoveryv1.EnrollRequest
		want commonv1.Reason
	}{
		{"forged", m.request(sign(forging, "mesh.test", claims(same)), good), invalid},
		{"of another mesh", m.request(sign(k.provisioner(), "other.test", claims(same)), good), invalid},
		{"without an algorithm", m.request("grt_"+none+"."+parts[1]+".", good), invalid},
		{"without a signature", m.request("grt_"+parts[0]+"."+parts[1]+".", good), invalid},
		{"truncated", m.request(m.token[:len(m.token)-1], good), invalid},
		{"huge", m.request("grt_"+strings.Repeat("A", 4000), good), invalid},
		{"nothing", m.request("grt_", good), invalid},
		{"another payload", m.request("grt_"+parts[0]+"."+altered(t, parts[1], foreign.node)+"."+parts[2], good), invalid},
		{"of a foreign node", m.request(foreign.token, good), invalid},
		{"of a foreign node, with its key", stranger.request(m.token, good), invalid},
		{
			"early", m.request(ours(func(c *ca.RecoveryClaims) { c.IssuedAt = c.IssuedAt.Add(time.Hour) }), good),
			commonv1.Reason_REASON_TOKEN_NOT_YET_VALID,
		},
		{
			"of a later era", m.request(ours(func(c *ca.RecoveryClaims) { c.Era = 7 }), good),
			commonv1.Reason_REASON_CONTROL_PLANE_ROLLBACK,
		},
		{"of another profile", m.request(ours(func(c *ca.RecoveryClaims) { c.Profile = "other" }), good), invalid},
		{"never recorded", m.request(ours(func(c *ca.RecoveryClaims) { c.TokenID = ids.New() }), good), invalid},
		{"of another instance", m.request(ours(func(c *ca.RecoveryClaims) { c.NodeInstanceID = ids.New() }), good), invalid},
		{"bound to a stranger's key", stranger.request(ours(func(c *ca.RecoveryClaims) {
			c.KeySHA256 = sha(stranger.public)
		}), good), invalid},
		{"no proof", func() *recoveryv1.EnrollRequest {
			req := m.request(m.token, good)
			req.RecoveryProof = nil
			return req
		}(), invalid},
		{"proof of another request", func() *recoveryv1.EnrollRequest {
			req := m.request(m.token, csr)
			req.Csr = good
			return req
		}(), invalid},
		{"proof of another token", func() *recoveryv1.EnrollRequest {
			req := m.request(foreign.token, good)
			req.Token = m.token
			return req
		}(), invalid},
		{"no request", m.request(m.token, []byte("nothing")), commonv1.Reason_REASON_CSR_REFUSED},
		{"the recovery key as the certificate's", func() *recoveryv1.EnrollRequest {
			own, err := pki.NewAnonymousCSR(m.key)
			if err != nil {
				t.Fatal(err)
			}
			return m.request(m.token, own)
		}(), commonv1.Reason_REASON_CSR_REFUSED},
	}
	if !bytes.Equal(k.claims(m).KeySHA256, sum) {
		t.Fatal("the token is bound to another key")
	}
	before := k.rows()
	signed := k.ca.signed.Load()
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, err := k.enroller.Enroll(k.ctx, "192.0.2.1", tt.req)
			k.refused(err, tt.want)
			if strings.Contains(err.Error(), parts[2]) {
				t.Error("the token is in the error")
			}
			if k.rows() != before {
				t.Error("something changed")
			}
		})
	}
	if n := k.ca.signed.Load() - signed; n != 0 {
		t.Errorf("%d signings", n)
	}
	m.mustRecover(good)
}

// altered returns a payload with another subject.
func altered(t *testing.T, payload, subject string) string {
	t.Helper()
	raw, err := base64.RawURLEncoding.DecodeString(payload)
	if err != nil {
		t.Fatal(err)
	}
	var fields map[string]any
	if err := json.Unmarshal(raw, &fields); err != nil {
		t.Fatal(err)
	}
	fields["sub"] = subject
	if raw, err = json.Marshal(fields); err != nil {
		t.Fatal(err)
	}
	return base64.RawURLEncoding.EncodeToString(raw)
}

// TestRecoveryByNodeState: an active node may, and one on hold for a lost join state, whose hold ends.
func TestRecoveryByNodeState(t *testing.T) {
	k := newKit(t)
	for state, want := range map[string]commonv1.Reason{
		"fenced":      commonv1.Reason_REASON_IDENTITY_REVOKED_OR_FENCED,
		"quarantined": commonv1.Reason_REASON_IDENTITY_QUARANTINED,
		"retired":     commonv1.Reason_REASON_IDENTITY_RETIRED,
		"pending":     commonv1.Reason_REASON_IDENTITY_UNKNOWN,
		"held":        commonv1.Reason_REASON_IDENTITY_HELD,
	} {
		m := k.enrolled("node-" + state)
		k.exec(`UPDATE recovery.identity SET state = $2 WHERE node_id = $1`, m.node, state)
		_, err := m.recover(k.csr())
		k.refused(err, want)
		if got := m.states(); got != "issued+" {
			t.Fatalf("%s: %s", state, got)
		}
	}
	for _, alarm := range []string{identity.AlarmClone, identity.AlarmTokenReuse} {
		m := k.enrolled("node-" + alarm)
		k.hold(m.node, alarm)
		_, err := m.recover(k.csr())
		k.refused(err, commonv1.Reason_REASON_IDENTITY_HELD)
	}
	for _, lost := range []bool{true, false} {
		m := k.enrolled("node-lost-" + map[bool]string{true: "all", false: "none"}[lost])
		k.hold(m.node, identity.AlarmJoinState)
		if lost {
			m.joinState = []byte("unreadable")
		}
		m.mustRecover(k.csr())
		if r := k.record(m.node); r.State != commonv1.NodeIdentityState_NODE_IDENTITY_STATE_ACTIVE || r.Alarm != "" {
			t.Fatalf("the hold did not end: %+v", r)
		}
		if lost {
			m.joinState = nil
		}
		m.admit()
	}
}

// TestManyRecoveriesAtOnce: 200 redemptions of one recovery token over two replicas are one signing and one effect.
func TestManyRecoveriesAtOnce(t *testing.T) {
	k := newKit(t)
	m := k.enrolled("node-1")
	replicas := []*enrol.Enroller{k.enroller, k.replica()}
	csr, signed := k.csr(), k.ca.signed.Load()
	var mu sync.Mutex
	chains := map[string]int{}
	reasons := map[commonv1.Reason]int{}
	var wg sync.WaitGroup
	for i := range 200 {
		req := m.request(m.token, csr)
		wg.Go(func() {
			resp, err := replicas[i%2].Enroll(k.ctx, "192.0.2.1", req)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				reasons[fault.ReasonOf(err)]++
				return
			}
			chains[string(resp.GetCertificateChainPem())]++
		})
	}
	wg.Wait()
	delete(reasons, commonv1.Reason_REASON_ENROLLMENT_IN_FLIGHT)
	if n := k.ca.signed.Load() - signed; n != 1 || len(chains) != 1 || len(reasons) > 0 {
		t.Fatalf("%d signings, %d certificates, %v", n, len(chains), reasons)
	}
	if n := k.recoveries(); n != 1 {
		t.Fatalf("%d effects", n)
	}
	m.mustRecover(csr)
	if got := m.states(); got != "used+ issued" {
		t.Fatalf("tokens: %s", got)
	}
}

// TestAnotherRecoveryKeyBeforeTheFirstSession: a machine that lost its recovery key with the answer gets a token for
// the new one, and the text for the old one is refused.
func TestAnotherRecoveryKeyBeforeTheFirstSession(t *testing.T) {
	k := newKit(t)
	m, bundle, csr := k.machine(), k.bootstrap("node-1"), k.csr()
	m.took(m.mustEnroll(bundle.Token, csr))
	old := *m
	fresh := k.machine()
	testkit.SetClockOffset(k.db, 2*time.Second)
	fresh.took(fresh.mustEnroll(bundle.Token, csr))
	_, err := old.recover(k.csr())
	k.refused(err, commonv1.Reason_REASON_TOKEN_INVALID)
	fresh.admit()
	fresh.mustRecover(k.csr())
}

// TestABadRecoveryKeyIsRefused names the field.
func TestABadRecoveryKeyIsRefused(t *testing.T) {
	k := newKit(t)
	m := k.machine()
	req := m.request(k.bootstrap("node-1").Token, k.csr())
	req.RecoveryPublicKey = []byte("no key")
	_, err := k.enroller.Enroll(k.ctx, "192.0.2.1", req)
	k.refused(err, commonv1.Reason_REASON_INVALID_ARGUMENT)
	if _, err := recoverykey.Parse(m.public); err != nil {
		t.Fatal(err)
	}
}
