package enrol_test

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pki/ca"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/recovery/enrol"
	"github.com/gpuaas/mesh/services/recovery/identity"
)

func TestEnrol(t *testing.T) {
	k := newKit(t)
	b := k.bootstrap("node-1")
	resp := k.mustEnroll(b.Token, k.csr())
	r := k.record(b.NodeID)
	leaf := k.leaf(resp.GetCertificateChainPem())
	if len(leaf.URIs) != 1 || leaf.URIs[0].String() != "spiffe://mesh.test/node/"+b.NodeID {
		t.Errorf("names %v", leaf.URIs)
	}
	if life := leaf.NotAfter.Sub(leaf.NotBefore); life < 8*time.Hour || life > 8*time.Hour+2*time.Minute {
		t.Errorf("lives %s", life)
	}
	if r.State != commonv1.NodeIdentityState_NODE_IDENTITY_STATE_ACTIVE || r.NextSerial != k.serialOf(resp) ||
		r.CurrentSerial != "" ||
		r.InstanceID != resp.GetNodeInstanceId() || r.FenceEpoch != 1 || r.Notice == 0 || !r.Fencing() {
		t.Errorf("%+v", r)
	}
	if resp.GetNodeName() != "node-1" || resp.GetTaskSigningPubkeys() != "k:AAAA" ||
		resp.GetProfile().GetName() != "default" ||
		resp.GetServerTime() == nil || resp.GetPolicy().GetCertificateTtl().AsDuration() != 8*time.Hour {
		t.Errorf("%v", resp)
	}
}

// TestReplay is B01 and B02: the same key gets the same certificate, another key revokes the token's family.
func TestReplay(t *testing.T) {
	k := newKit(t)
	b := k.bootstrap("node-1")
	csr := k.csr()
	first := k.mustEnroll(b.Token, csr)
	again := k.mustEnroll(b.Token, csr)
	if string(first.GetCertificateChainPem()) != string(again.GetCertificateChainPem()) ||
		first.GetNodeInstanceId() != again.GetNodeInstanceId() {
		t.Fatal("the same key got another certificate")
	}
	if n := k.ca.signed.Load(); n != 1 {
		t.Fatalf("%d signings", n)
	}
	_, err := k.enroll(b.Token, k.csr())
	k.refused(err, commonv1.Reason_REASON_TOKEN_CONSUMED)
	r := k.record(b.NodeID)
	if r.Alarm != identity.AlarmTokenReuse || r.State != commonv1.NodeIdentityState_NODE_IDENTITY_STATE_HELD {
		t.Fatalf("after a second key: %+v", r)
	}
	_, err = k.enroll(b.Token, csr)
	k.refused(err, commonv1.Reason_REASON_TOKEN_CONSUMED)
	// A person issues a new bundle, which ends the hold and all earlier tokens and certificates.
	fresh := k.bootstrap("node-1")
	resp := k.mustEnroll(fresh.Token, k.csr())
	if r := k.record(b.NodeID); r.Alarm != "" || r.State != commonv1.NodeIdentityState_NODE_IDENTITY_STATE_ACTIVE ||
		resp.GetNodeId() != b.NodeID ||
		resp.GetNodeInstanceId() == first.GetNodeInstanceId() {
		t.Fatalf("after a fresh bundle: %+v", r)
	}
	if n := k.count(`SELECT count(*) FROM recovery.serial WHERE state = 'revoked'`); n != 1 {
		t.Fatalf("%d certificates of the earlier life are revoked", n)
	}
}

// TestNothingChangesBeforeTheProof is B03, B04, B06 and B10: an attempt with a wrong token or request uses nothing up.
func TestNothingChangesBeforeTheProof(t *testing.T) {
	k := newKit(t)
	b := k.bootstrap("node-1")
	other := k.bootstrap("node-2")
	boxed := k.prepare(ids.New(), 1)
	forged, _ := newSecret(strings.Repeat("0", 8) + boxed.instance[8:])
	sameID := b.Token[:len("gbt_")+32+1] + other.Token[len("gbt_")+32+1:]
	key, good := k.key()
	sign := func(template *x509.CertificateRequest, key any) []byte {
		der, err := x509.CreateCertificateRequest(rand.Reader, template, key)
		if err != nil {
			t.Fatal(err)
		}
		return der
	}
	small, err := rsa.GenerateKey(rand.Reader, 1024) // that it is refused is the point
	if err != nil {
		t.Fatal(err)
	}
	odd, err := ecdsa.GenerateKey(elliptic.P224(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	foreign := &url.URL{Scheme: "spiffe", Host: "mesh.test", Path: "/node/" + other.NodeID}
	broken := append([]byte(nil), good...)
	broken[len(broken)-1] ^= 1
	tests := []struct {
		name  string
		token string
		csr   []byte
		want  commonv1.Reason
	}{
		{name: "empty", token: "", csr: good, want: commonv1.Reason_REASON_TOKEN_INVALID},
		{name: "no prefix", token: strings.Repeat("x", 80), csr: good, want: commonv1.Reason_REASON_TOKEN_INVALID},
		{
			name: "a JWT without an algorithm", token: "eyJhbGciOiJub25lIn0.eyJzdWIiOiJub2RlIn0.", csr: good,
			want: commonv1.Reason_REASON_TOKEN_INVALID,
		},
		{
			name: "sql in the id", token: "gbt_'; DROP TABLE recovery.token; --_" + strings.Repeat("A", 43), csr: good,
			want: commonv1.Reason_REASON_TOKEN_INVALID,
		},
		{name: "another token's secret", token: sameID, csr: good, want: commonv1.Reason_REASON_TOKEN_INVALID},
		{name: "unknown id", token: forged, csr: good, want: commonv1.Reason_REASON_TOKEN_INVALID},
		{name: "another kind", token: "gls" + b.Token[3:], csr: good, want: commonv1.Reason_REASON_TOKEN_INVALID},
		{name: "truncated", token: b.Token[:len(b.Token)-1], csr: good, want: commonv1.Reason_REASON_TOKEN_INVALID},
		{name: "bad self-signature", token: b.Token, csr: broken, want: commonv1.Reason_REASON_CSR_REFUSED},
		{name: "no request", token: b.Token, csr: []byte("nothing"), want: commonv1.Reason_REASON_CSR_REFUSED},
		{
			name: "small key", token: b.Token, csr: sign(&x509.CertificateRequest{}, small),
			want: commonv1.Reason_REASON_CSR_REFUSED,
		},
		{
			name: "odd curve", token: b.Token, csr: sign(&x509.CertificateRequest{}, odd),
			want: commonv1.Reason_REASON_CSR_REFUSED,
		},
		{
			name: "another node's name", token: b.Token, csr: sign(&x509.CertificateRequest{URIs: []*url.URL{foreign}}, key),
			want: commonv1.Reason_REASON_CSR_REFUSED,
		},
		{
			name: "a host name", token: b.Token, csr: sign(&x509.CertificateRequest{DNSNames: []string{"nodeapi"}}, key),
			want: commonv1.Reason_REASON_CSR_REFUSED,
		},
		{
			name: "an authority", token: b.Token,
			csr: sign(&x509.CertificateRequest{ExtraExtensions: []pkix.Extension{{
				Id:    []int{2, 5, 29, 19},
				Value: []byte{0x30, 3, 1, 1, 0xff},
			}}}, key),
			want: commonv1.Reason_REASON_CSR_REFUSED,
		},
	}
	before := k.snapshot()
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, err := k.enroll(tt.token, tt.csr)
			k.refused(err, tt.want)
			if err != nil && b.Token != "" && strings.Contains(err.Error(), b.Token[40:]) {
				t.Error("the secret is in the error")
			}
			if k.snapshot() != before {
				t.Error("something changed")
			}
		})
	}
	if n := k.ca.signed.Load(); n != 0 {
		t.Errorf("%d signings", n)
	}
	k.mustEnroll(b.Token, good)
}

// TestExpiry is B04 by the database's clock.
func TestExpiry(t *testing.T) {
	k := newKit(t)
	b := k.bootstrap("node-1")
	testkit.SetClockOffset(k.db, enrol.DefaultTokenLife-2*time.Second)
	other := k.bootstrap("node-2")
	testkit.SetClockOffset(k.db, enrol.DefaultTokenLife+time.Second)
	_, err := k.enroll(b.Token, k.csr())
	k.refused(err, commonv1.Reason_REASON_TOKEN_EXPIRED)
	k.mustEnroll(other.Token, k.csr())
	swept, err := k.enroller.Sweep(k.ctx)
	if err != nil || swept.Tokens != 1 {
		t.Fatalf("%+v %v", swept, err)
	}
	_, err = k.enroll(b.Token, k.csr())
	k.refused(err, commonv1.Reason_REASON_TOKEN_EXPIRED)
}

// TestALostAnswerIsRepeatedAfterTheExpiry: a token was used within its life, and the answer was lost. The same key gets
// it again when the token's life is over, since its earlier certificates ended with that use; any other key is refused
// as before, and the node stays as it is.
func TestALostAnswerIsRepeatedAfterTheExpiry(t *testing.T) {
	k := newKit(t)
	m := k.enrolled("node-1")
	bundle := k.mustBundle(m.node).Token
	bootstrap := k.bootstrap("node-2").Token
	tokens := map[string][]byte{bundle: k.csr(), bootstrap: k.csr()}
	answers := map[string]*recoveryv1.EnrollResponse{}
	for token, csr := range tokens {
		answers[token] = k.mustEnroll(token, csr)
	}
	signed := k.ca.signed.Load()
	testkit.SetClockOffset(k.db, enrol.DefaultTokenLife+time.Second)
	for token, csr := range tokens {
		again := k.mustEnroll(token, csr)
		if !bytes.Equal(again.GetCertificateChainPem(), answers[token].GetCertificateChainPem()) {
			t.Error("the answer is another one")
		}
		_, err := k.enroll(token, k.csr())
		k.refused(err, commonv1.Reason_REASON_TOKEN_EXPIRED)
		if r := k.record(again.GetNodeId()); r.Alarm != "" || r.NextSerial != k.serialOf(again) {
			t.Errorf("the node has alarm %q and certificate %s", r.Alarm, r.NextSerial)
		}
	}
	if n := k.ca.signed.Load(); n != signed {
		t.Errorf("%d certificates were signed for repeated requests", n-signed)
	}
}

// TestNodeState is B05.
func TestNodeState(t *testing.T) {
	k := newKit(t)
	for state, want := range map[string]commonv1.Reason{
		"fenced":      commonv1.Reason_REASON_IDENTITY_REVOKED_OR_FENCED,
		"quarantined": commonv1.Reason_REASON_IDENTITY_REVOKED_OR_FENCED,
		"retired":     commonv1.Reason_REASON_IDENTITY_RETIRED,
	} {
		b := k.bootstrap("node-" + state)
		csr := k.csr()
		k.mustEnroll(b.Token, csr)
		k.exec(`UPDATE recovery.identity SET state = $2 WHERE node_id = $1`, b.NodeID, state)
		_, err := k.enroll(b.Token, csr)
		k.refused(err, want)
	}
}

// TestManyAtOnce is B08: 200 redemptions of one token over two replicas, with one key or many, are one signing.
func TestManyAtOnce(t *testing.T) {
	for _, mixed := range []bool{false, true} {
		name := "one key"
		if mixed {
			name = "many keys"
		}
		t.Run(name, func(t *testing.T) {
			k := newKit(t)
			b := k.bootstrap("node-1")
			replicas := []*enrol.Enroller{k.enroller, k.replica()}
			shared := k.csr()
			csrs := make([][]byte, 200)
			for i := range csrs {
				csrs[i] = shared
				if mixed && i%2 == 1 {
					csrs[i] = k.csr()
				}
			}
			var mu sync.Mutex
			chains := map[string]int{}
			reasons := map[commonv1.Reason]int{}
			var wg sync.WaitGroup
			for i, csr := range csrs {
				wg.Go(func() {
					resp, err := replicas[i%2].Enroll(k.ctx, "192.0.2.1", &recoveryv1.EnrollRequest{Token: b.Token, Csr: csr})
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
			if n := k.ca.signed.Load(); n != 1 || len(chains) > 1 {
				t.Fatalf("%d signings, %d certificates, %v", n, len(chains), reasons)
			}
			delete(reasons, commonv1.Reason_REASON_ENROLLMENT_IN_FLIGHT)
			if mixed {
				delete(reasons, commonv1.Reason_REASON_TOKEN_CONSUMED)
			}
			if len(reasons) > 0 {
				t.Fatalf("losers were told %v", reasons)
			}
			if n := k.count(`SELECT count(*) FROM recovery.enrollment WHERE state = 'done'`); n != 1 {
				t.Fatalf("%d effects", n)
			}
			if !mixed {
				k.mustEnroll(b.Token, shared)
			}
			if n := k.ca.signed.Load(); n != 1 {
				t.Fatalf("%d signings after asking again", n)
			}
		})
	}
}

// TestCrashAfterSigning is B09: a certificate that was signed and not stored is an orphan, and the next attempt gets
// the one that counts.
func TestCrashAfterSigning(t *testing.T) {
	k := newKit(t)
	b := k.bootstrap("node-1")
	csr := k.csr()
	var orphan string
	// The process ends between the authority's answer and the row: no code is left running that could give the claim back.
	k.ca.afterSigning(func(issued ca.Issued) error {
		orphan = issued.Serial
		panic(crash{})
	})
	func() {
		defer func() {
			if _, ok := recover().(crash); !ok {
				t.Error("it did not crash")
			}
		}()
		_, _ = k.enroll(b.Token, csr)
	}()
	k.ca.afterSigning(nil)
	_, err := k.enroll(b.Token, csr)
	k.refused(err, commonv1.Reason_REASON_ENROLLMENT_IN_FLIGHT)
	if fault.RetryAfterOf(err) <= 0 {
		t.Error("no wait is given")
	}
	testkit.SetClockOffset(k.db, 11*time.Second)
	resp := k.mustEnroll(b.Token, csr)
	if got := k.serialOf(resp); got == orphan || k.record(b.NodeID).NextSerial != got {
		t.Fatalf("serial %s, orphan %s", got, orphan)
	}
	if n := k.count(`SELECT count(*) FROM recovery.serial`); n != 1 {
		t.Fatalf("%d serials", n)
	}
	if n := k.count(`SELECT count(*) FROM recovery.enrollment WHERE state = 'abandoned'`); n != 1 {
		t.Fatalf("%d abandoned attempts", n)
	}
}

type crash struct{}

// TestTakenOver lets a paused attempt come back after another one took over its claim: its certificate is recorded as
// an orphan.
func TestTakenOver(t *testing.T) {
	k := newKit(t)
	b := k.bootstrap("node-1")
	slow, quick := k.csr(), k.csr()
	var orphan, winner string
	k.ca.afterSigning(func(issued ca.Issued) error {
		k.ca.afterSigning(nil)
		orphan = issued.Serial
		testkit.SetClockOffset(k.db, 11*time.Second)
		resp := k.mustEnroll(b.Token, quick)
		winner = k.serialOf(resp)
		return nil
	})
	_, err := k.enroll(b.Token, slow)
	k.refused(err, commonv1.Reason_REASON_ENROLLMENT_IN_FLIGHT)
	if r := k.record(b.NodeID); r.NextSerial != winner {
		t.Fatalf("next %s, winner %s", r.NextSerial, winner)
	}
	if n := k.count(`SELECT count(*) FROM recovery.enrollment WHERE state = 'abandoned' AND serial = $1`, orphan); n != 1 {
		t.Fatal("the orphan is not recorded")
	}
	_, err = k.enroll(b.Token, slow)
	k.refused(err, commonv1.Reason_REASON_TOKEN_CONSUMED)
}

// TestFencedWhileSigning decides about the node while the authority signs.
func TestFencedWhileSigning(t *testing.T) {
	k := newKit(t)
	b := k.bootstrap("node-1")
	k.ca.afterSigning(func(ca.Issued) error {
		k.exec(`UPDATE recovery.identity SET state = 'retired' WHERE node_id = $1`, b.NodeID)
		return nil
	})
	_, err := k.enroll(b.Token, k.csr())
	k.refused(err, commonv1.Reason_REASON_IDENTITY_RETIRED)
	if n := k.count(`SELECT count(*)
		FROM recovery.serial`) + k.count(`SELECT count(*) FROM recovery.enrollment WHERE state = 'claimed'`); n != 0 {
		t.Fatalf("%d left behind", n)
	}
}

// TestAuthorityDown gives the claim back at once: nothing was used.
func TestAuthorityDown(t *testing.T) {
	k := newKit(t)
	b := k.bootstrap("node-1")
	csr := k.csr()
	k.ca.afterSigning(func(ca.Issued) error {
		return fault.New(commonv1.Reason_REASON_CERTIFICATE_AUTHORITY_UNAVAILABLE, "", fault.Cause(errors.New("down")))
	})
	for range 3 {
		_, err := k.enroll(b.Token, csr)
		k.refused(err, commonv1.Reason_REASON_CERTIFICATE_AUTHORITY_UNAVAILABLE)
	}
	k.ca.afterSigning(nil)
	k.mustEnroll(b.Token, csr)
}

func TestIssueBootstrap(t *testing.T) {
	k := newKit(t)
	issue := func(name, key, by string) (enrol.Bundle, error) {
		return k.enroller.IssueBootstrap(k.ctx, name, "", time.Minute, key, by)
	}
	first, err := issue("node-1", "k1", "ada")
	if err != nil {
		t.Fatal(err)
	}
	// The answer was lost: the same request returns a token that works, and the lost one is invalid.
	second, err := issue("node-1", "k1", "ada")
	if err != nil || second.NodeID != first.NodeID {
		t.Fatalf("%+v %v", second, err)
	}
	_, err = k.enroll(first.Token, k.csr())
	k.refused(err, commonv1.Reason_REASON_TOKEN_INVALID)
	_, err = issue("node-9", "k1", "ada")
	k.refused(err, commonv1.Reason_REASON_IDEMPOTENCY_KEY_REUSED)
	// Another token for the same pending node: one is live.
	third, err := issue("node-1", "k2", "bob")
	if err != nil || third.NodeID != first.NodeID {
		t.Fatalf("%+v %v", third, err)
	}
	_, err = k.enroll(second.Token, k.csr())
	k.refused(err, commonv1.Reason_REASON_TOKEN_CONSUMED)
	k.mustEnroll(third.Token, k.csr())
	_, err = issue("node-1", "k2", "bob")
	k.refused(err, commonv1.Reason_REASON_PRECONDITION_FAILED)
	// The node enrolled and was never ready: perhaps the machine never got that certificate.
	if _, err := issue("node-1", "k3", "bob"); err != nil {
		t.Fatal(err)
	}
	list := testkit.Events(t, k.pool, "kind = 'node_identity.changed' AND aggregate_id = $1", first.NodeID)
	if last := list[len(list)-1]; !strings.HasPrefix(last.Text("state_reason"), "enrolled, and never connected") {
		t.Errorf("people see %q", last.Text("state_reason"))
	}
	k.exec(`UPDATE recovery.identity SET current_serial = next_serial, next_serial = ''`)
	_, err = issue("node-1", "k4", "bob")
	k.refused(err, commonv1.Reason_REASON_ALREADY_EXISTS)
	// A fenced node may have been copied, so its identity must not come back: retiring it frees its name.
	k.exec(`UPDATE recovery.identity SET state = 'fenced'`)
	_, err = issue("node-1", "k5", "bob")
	k.refused(err, commonv1.Reason_REASON_ALREADY_EXISTS)
	if f, ok := fault.As(err); !ok || !strings.Contains(f.Remedy, "gpuaas nodes retire") {
		t.Errorf("the next action is %v", f)
	}
	_, err = k.enroller.IssueBootstrap(k.ctx, "node-2", "", 25*time.Hour, "", "ada")
	k.refused(err, commonv1.Reason_REASON_INVALID_ARGUMENT)
}

func TestRateLimit(t *testing.T) {
	k := newKit(t)
	e, err := enrol.New(enrol.Deps{
		Logger: testkit.Logger(t), Pool: k.pool, Signer: k.ca, Policy: fixedPolicy(), Profiles: twoProfiles{},
		TaskKeys: func() (string, error) { return "", nil }, JoinStates: k.keys,
	}, enrol.Config{TrustDomain: "mesh.test", PerToken: 0.001, PerTokenBurst: 2})
	if err != nil {
		t.Fatal(err)
	}
	b := k.bootstrap("node-1")
	other := k.bootstrap("node-2")
	csr := k.csr()
	for i := range 3 {
		_, err := e.Enroll(k.ctx, "192.0.2.1", &recoveryv1.EnrollRequest{Token: b.Token, Csr: csr})
		if want := i == 2; fault.Has(err, commonv1.Reason_REASON_RATE_LIMITED) != want {
			t.Fatalf("attempt %d: %v", i, err)
		}
	}
	if _, err := e.Enroll(k.ctx, "192.0.2.1", &recoveryv1.EnrollRequest{Token: other.Token, Csr: k.csr()}); err != nil {
		t.Fatalf("another token is slowed: %v", err)
	}
	// Callers without a valid token are bounded by their address, and use up no budget but their own.
	for i := range 502 {
		_, err := e.Enroll(k.ctx, "192.0.2.66", &recoveryv1.EnrollRequest{Token: "gbt_nonsense", Csr: csr})
		if err == nil || (i == 501 && !fault.Has(err, commonv1.Reason_REASON_RATE_LIMITED) &&
			!fault.Has(err, commonv1.Reason_REASON_TOKEN_INVALID)) {
			t.Fatalf("attempt %d: %v", i, err)
		}
	}
	fresh := k.bootstrap("node-3")
	if _, err := e.Enroll(k.ctx, "192.0.2.1", &recoveryv1.EnrollRequest{Token: fresh.Token, Csr: k.csr()}); err != nil {
		t.Fatalf("an honest machine is slowed by strangers: %v", err)
	}
}

// TestSessionsAreCountedForADay checks that the sweep leaves the sessions of the last day, which are counted for
// `gpuaas nodes get`, and the one that stands.
func TestSessionsAreCountedForADay(t *testing.T) {
	k := newKit(t)
	b := k.bootstrap("node-1")
	k.mustEnroll(b.Token, k.csr())
	insert := func(id, age string) {
		k.exec(`INSERT INTO recovery.session_open (session_id, node_id, node_instance_id, verdict, serial, fence_epoch,
			opened_at) SELECT $1::uuid, $2::uuid, $2::uuid, 'welcome', '', 0, mesh.clock() - $3::interval`, id, b.NodeID, age)
	}
	stands := ids.New()
	insert(ids.New(), "23 hours")
	insert(ids.New(), "25 hours")
	insert(stands, "30 hours")
	k.exec(`UPDATE recovery.identity SET confirmed_session_id = $2::uuid WHERE node_id = $1::uuid`, b.NodeID, stands)
	if swept, err := k.enroller.Sweep(k.ctx); err != nil || swept.Sessions != 1 {
		t.Errorf("swept %+v, %v", swept, err)
	}
}
