package enrol_test

import (
	"testing"
	"testing/synctest"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
)

// TestAKeyOfAnotherNodeIsReplaced enrols a machine whose pending key came with another's image: it sends another
// request with a key of its own, soon and without an operator.
func TestAKeyOfAnotherNodeIsReplaced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost(t, "recovery", false)
		defer h.end()
		h.answer = func(n int, ok *recoveryv1.EnrollResponse) (*recoveryv1.EnrollResponse, error) {
			if n == 0 {
				return nil, fault.ToConnect(fault.New(commonv1.Reason_REASON_KEY_REUSE, ""), "")
			}
			return ok, nil
		}
		if err := h.enroller().Run(t.Context()); err != nil {
			t.Fatal(err)
		}
		if len(h.calls) != 2 || len(h.keys) != 2 {
			t.Fatalf("%d calls with %d keys", len(h.calls), len(h.keys))
		}
		if wait := h.calls[1].Sub(h.calls[0]); wait < 5*time.Second || wait > 36*time.Second {
			t.Errorf("asked again after %v", wait)
		}
		if len(h.codes) != 1 || h.codes[0] != commonv1.DiagnosticCode_DIAGNOSTIC_CODE_ENROLLMENT_REFUSED {
			t.Errorf("diagnostics %v", h.codes)
		}
	})
}
