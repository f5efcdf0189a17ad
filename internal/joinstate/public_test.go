package joinstate_test

import (
	"testing"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/joinstate"
	"github.com/gpuaas/mesh/internal/pki"
)

func TestVerifierReadsWhatTheKeysPublish(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	keys, err := joinstate.LoadOrCreateKeys(dir)
	if err != nil {
		t.Fatal(err)
	}
	set, err := keys.Public()
	if err != nil {
		t.Fatal(err)
	}
	again, err := pki.ParseKeySet(set.String())
	if err != nil {
		t.Fatal(err)
	}
	verifier, err := joinstate.NewVerifier(again)
	if err != nil {
		t.Fatal(err)
	}
	want := joinstate.State{NodeID: "n", NodeInstanceID: "i", Generation: 7, Serial: "ab", Era: 1}
	signed, err := keys.Sign(want)
	if err != nil {
		t.Fatal(err)
	}
	got, err := verifier.Verify(signed)
	if err != nil || got != want {
		t.Fatalf("Verify = %+v, %v; want %+v", got, err, want)
	}
	signed[len(signed)-1] ^= 1
	if _, err := verifier.Verify(signed); !fault.Has(err, commonv1.Reason_REASON_JOIN_STATE_LOST) {
		t.Fatalf("a forged state: %v", err)
	}
}
