package enrol_test

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/failpoint"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/testkit"
)

// handOverEnv is set in the process in which the points of a hand-over fail.
const handOverEnv = "GPUAAS_TEST_HAND_OVER"

// The points of an enrolment and of a renewal.
var (
	enrolPoints = []string{
		"recovery.enroll.before_claim_commit", "recovery.enroll.after_sign", "recovery.enroll.before_commit",
		"recovery.enroll.after_commit",
	}
	renewPoints = []string{"recovery.renew.after_sign", "recovery.renew.before_commit", "recovery.renew.after_commit"}
)

// TestAHandOverThatIsCutAtEachPoint runs TestHandOver in a process for each point at which it is cut. After every cut
// the machine has a token that is accepted, and the same key goes on.
func TestAHandOverThatIsCutAtEachPoint(t *testing.T) {
	testkit.IO(t)
	for _, point := range append(append([]string{}, enrolPoints...), renewPoints...) {
		t.Run(point, func(t *testing.T) {
			// The points of an enrolment are passed once by the operator's token before.
			armed := point + "=error"
			if strings.HasPrefix(point, "recovery.enroll.") {
				armed += ":2"
			}
			cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestHandOver$", "-test.v")
			cmd.Env = append(os.Environ(), handOverEnv+"="+point, "GPUAAS_FAILPOINTS="+armed)
			out, err := cmd.CombinedOutput()
			if err != nil || !bytes.Contains(out, []byte("cut at "+point)) {
				t.Fatalf("%v\n%s", err, out)
			}
		})
	}
}

// TestHandOver is the process of one point, and does nothing in any other.
func TestHandOver(t *testing.T) {
	point := os.Getenv(handOverEnv)
	if point == "" {
		return
	}
	k := newKit(t)
	m := k.enrolled("node-1")
	cut := func(err error) bool {
		if errors.Is(err, failpoint.ErrInjected) {
			t.Log("cut at " + point)
			return true
		}
		return false
	}
	renew := func() {
		csr := k.csr()
		for attempt := range 4 {
			renewed, err := k.enroller.Renew(k.ctx, m.renewal(csr))
			if err == nil {
				m.serial, m.token = renewed.Serial.Serial, renewed.RecoveryToken
				return
			}
			if !cut(err) {
				k.refused(err, commonv1.Reason_REASON_ENROLLMENT_IN_FLIGHT)
			}
			// The token that the machine has is accepted: it would have got a certificate but for the lease of the attempt.
			probe := *m
			testkit.SetClockOffset(k.db, time.Duration(attempt+1)*11*time.Second)
			if got := probe.states(); !strings.Contains(got, "issued+") {
				t.Fatalf("after a cut: %s", got)
			}
		}
		t.Fatal("the renewal did not come to an end")
	}
	renew()
	m.admit()
	if got := m.states(); got != "revoked:replaced+ issued+" {
		t.Fatalf("after a renewal: %s", got)
	}
	csr := k.csr()
	for attempt := range 5 {
		resp, err := m.recover(csr)
		if err == nil {
			m.took(resp)
			break
		}
		if !cut(err) && !fault.Has(err, commonv1.Reason_REASON_ENROLLMENT_IN_FLIGHT) {
			t.Fatal(err)
		}
		if attempt == 4 {
			t.Fatal("the recovery did not come to an end")
		}
		testkit.SetClockOffset(k.db, time.Duration(attempt+5)*11*time.Second)
	}
	m.admit()
	if r := k.record(m.node); r.Alarm != "" || r.State != commonv1.NodeIdentityState_NODE_IDENTITY_STATE_ACTIVE {
		t.Fatalf("%+v", r)
	}
	m.mustRecover(k.csr()) // by the token of the answer
	if n := k.recoveries(); n != 2 {
		t.Fatalf("%d recoveries", n)
	}
}
