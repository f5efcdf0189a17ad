package enrol_test

import (
	"testing"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/internal/testkit"
)

// TestTheAgeOfARecoveryTokenIsThePolicys: a token of 30 hours enrols its node while the key allows 48, and not while it
// allows the 24 of the default.
func TestTheAgeOfARecoveryTokenIsThePolicys(t *testing.T) {
	k := newKit(t)
	m := k.enrolled("node-1")
	testkit.SetClockOffset(k.db, 30*time.Hour)
	_, err := m.recover(k.csr())
	k.refused(err, commonv1.Reason_REASON_TOKEN_EXPIRED)
	k.setPolicy(map[string]string{policy.RecoveryTokenMaxAgeSeconds: "172800"})
	m.mustRecover(k.csr())
}

// TestTheLifeOfACertificateIsThePolicys: a certificate is signed for as long as the key says.
func TestTheLifeOfACertificateIsThePolicys(t *testing.T) {
	k := newKit(t)
	life := func(name string) time.Duration {
		t.Helper()
		m := k.machine()
		leaf := k.leaf(m.mustEnroll(k.bootstrap(name).Token, k.csr()).GetCertificateChainPem())
		return time.Until(leaf.NotAfter)
	}
	if left := life("node-1"); left < 7*time.Hour || left > 8*time.Hour {
		t.Errorf("by default a certificate lives for %s", left)
	}
	k.setPolicy(map[string]string{policy.CertificateTTLSeconds: "1200"})
	if left := life("node-2"); left < 15*time.Minute || left > 20*time.Minute {
		t.Errorf("after a change a certificate lives for %s", left)
	}
}

// TestAnEnrolmentBringsTheWholePolicy checks that the answer to an enrolment leaves no field of the agent's policy out,
// and that it has the values of the keys.
func TestAnEnrolmentBringsTheWholePolicy(t *testing.T) {
	k := newKit(t)
	k.setPolicy(map[string]string{policy.WorkloadCrashLoopRestarts: "9"})
	got := k.machine().mustEnroll(k.bootstrap("node-1").Token, k.csr()).GetPolicy()
	if got.GetCrashLoopRestarts() != 9 {
		t.Errorf("%d restarts are a crash loop, want 9", got.GetCrashLoopRestarts())
	}
	fields := got.ProtoReflect().Descriptor().Fields()
	for i := range fields.Len() {
		if !got.ProtoReflect().Has(fields.Get(i)) {
			t.Errorf("the policy has no %s", fields.Get(i).Name())
		}
	}
}
