package enrol_test

import (
	"testing"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/pki/ca"
	"github.com/gpuaas/mesh/services/recovery/enrol"
)

// FuzzToken has no text accepted but those that were issued, and every refusal typed.
func FuzzToken(f *testing.F) {
	key, err := pki.NewKey()
	if err != nil {
		f.Fatal(err)
	}
	tokens, err := ca.NewRecoveryTokens(key, "mesh.test")
	if err != nil {
		f.Fatal(err)
	}
	good, err := tokens.Sign(ca.RecoveryClaims{
		TokenID: ids.New(), NodeID: ids.New(), NodeInstanceID: ids.New(), Profile: "default", KeySHA256: make([]byte, 32),
		IssuedAt: time.Unix(1e9, 0),
	})
	if err != nil {
		f.Fatal(err)
	}
	for _, seed := range []string{
		good, good[:len(good)-1], good + "A", "grt_", "grt_..", "grt_" + good, "gbt_0192f0c1000070008000000000000001_",
		"gls_x_y", "grt_eyJhbGciOiJub25lIn0.e30.", "",
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		presented, err := enrol.ParseToken(text)
		if err != nil {
			if !fault.Has(err, commonv1.Reason_REASON_TOKEN_INVALID) {
				t.Fatalf("%v", err)
			}
			return
		}
		if presented.Kind != enrol.KindRecovery {
			return
		}
		if _, err := tokens.Verify(text); err == nil && text != good {
			// The signature of ES256 has a second form; the contents are the same.
			if len(text) != len(good) || text[:len(good)-86] != good[:len(good)-86] {
				t.Fatalf("%q is accepted", text)
			}
		}
	})
}
