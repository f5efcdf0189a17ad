package enrol_test

import (
	"sync"
	"testing"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pki/ca"
)

// stop writes what the preflight writes when the ingress refuses the authority's certificates, and when it does not.
func (k *kit) stop(state string) {
	k.t.Helper()
	k.exec(`UPDATE recovery.ca_preflight SET state = $1, failing_side = 'ingress', next_action = 'repair the ingress',
		since = mesh.clock(), version = version + 1`, state)
}

const claims = `SELECT count(*) FROM recovery.enrollment`

// TestStoppedIssuance checks that while the ingress refuses the authority's certificates nothing is issued: no claim is
// taken, no token is used, and agents wait. It goes on as soon as the preflight does.
func TestStoppedIssuance(t *testing.T) {
	k := newKit(t)
	b := k.bootstrap("node-1")
	resp := k.mustEnroll(b.Token, k.csr())
	session := ids.New()
	k.exec(`UPDATE recovery.serial SET state = 'current', ready_at = mesh.clock()`)
	k.exec(`UPDATE recovery.identity
		SET current_serial = next_serial, next_serial = '', issued = 1, confirmed = 1, confirmed_session_id = $1`, session)
	renewal := &recoveryv1.RenewCertificateRequest{
		NodeId: b.NodeID, NodeInstanceId: resp.GetNodeInstanceId(), SessionId: session, Serial: k.serialOf(resp),
		Csr: k.csr(),
	}
	other, instance := k.bootstrap("node-2"), k.prepare(ids.New(), 1)
	k.stop("mismatch")
	before, signed := k.snapshot(), k.ca.signed.Load()
	csr := k.csr()
	for _, token := range []string{other.Token, instance.secret} {
		_, err := k.enroll(token, csr)
		k.refused(err, commonv1.Reason_REASON_CERTIFICATE_AUTHORITY_UNAVAILABLE)
		if fault.ActionOf(err) != commonv1.Action_ACTION_WAIT || fault.RetryAfterOf(err) == 0 {
			t.Errorf("refused with %v", err)
		}
	}
	_, err := k.enroller.Renew(k.ctx, renewal)
	k.refused(err, commonv1.Reason_REASON_CERTIFICATE_AUTHORITY_UNAVAILABLE)
	if k.snapshot() != before || k.ca.signed.Load() != signed {
		t.Error("a refused request has changed rows, or was signed")
	}
	k.refused(func() error { _, err := k.enroll("gbt_"+other.Token[4:40]+"x", csr); return err }(),
		commonv1.Reason_REASON_TOKEN_INVALID) // a caller without a proof is told no more
	k.stop("ok")
	k.mustEnroll(other.Token, csr)
	if _, err := k.enroller.Renew(k.ctx, renewal); err != nil {
		t.Error(err)
	}
}

// TestStoppedWhileSigning checks that a certificate that was being signed when the stop began is not stored.
func TestStoppedWhileSigning(t *testing.T) {
	k := newKit(t)
	b := k.bootstrap("node-1")
	k.ca.afterSigning(func(ca.Issued) error { k.stop("mismatch"); return nil })
	csr := k.csr()
	_, err := k.enroll(b.Token, csr)
	k.refused(err, commonv1.Reason_REASON_CERTIFICATE_AUTHORITY_UNAVAILABLE)
	if n := k.count(`SELECT count(*) FROM recovery.serial WHERE state IN ('next', 'current')`); n != 0 {
		t.Errorf("%d certificates count", n)
	}
	k.ca.afterSigning(nil)
	k.stop("ok")
	k.mustEnroll(b.Token, csr)
}

// TestStoppedAmongMany begins the stop while many enrol: from its commit on no claim is taken.
func TestStoppedAmongMany(t *testing.T) {
	k := newKit(t)
	tokens := make([]string, 40)
	for i := range tokens {
		tokens[i] = k.bootstrap("node-" + string(rune('a'+i%26)) + string(rune('a'+i/26))).Token
	}
	var all sync.WaitGroup
	var mu sync.Mutex
	issued := 0
	begin := make(chan struct{})
	k.ca.afterSigning(func(ca.Issued) error {
		select {
		case begin <- struct{}{}:
		default:
		}
		return nil
	})
	for _, token := range tokens {
		csr := k.csr()
		all.Go(func() {
			_, err := k.enroller.Enroll(k.ctx, "192.0.2.1", &recoveryv1.EnrollRequest{Token: token, Csr: csr})
			mu.Lock()
			defer mu.Unlock()
			switch {
			case err == nil:
				issued++
			case fault.ReasonOf(err) != commonv1.Reason_REASON_CERTIFICATE_AUTHORITY_UNAVAILABLE:
				t.Errorf("refused with %v", err)
			}
		})
	}
	<-begin
	k.stop("mismatch")
	all.Wait()
	late := k.count(`SELECT count(*) FROM recovery.enrollment e WHERE e.started_at >
		(SELECT p.since + interval '1 second' FROM recovery.ca_preflight p)`)
	if stored := k.count(`SELECT count(*) FROM recovery.serial`); late > 0 || stored < issued {
		t.Errorf("%d claims after the stop; %d certificates for %d answers", late, stored, issued)
	}
	before := k.count(claims)
	_, err := k.enroll(tokens[0], k.csr())
	if err == nil || k.count(claims) != before {
		t.Errorf("a claim was taken: %v", err)
	}
}
