package ca_test

import (
	"bytes"
	"crypto/ecdsa"
	"encoding/json"
	"encoding/pem"
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/pki/ca"
)

func recoveryTokens(t *testing.T, authority *ca.Embedded, domain string) *ca.RecoveryTokens {
	t.Helper()
	tokens, err := ca.NewRecoveryTokens(authority.ProvisionerKey(), domain)
	if err != nil {
		t.Fatal(err)
	}
	return tokens
}

func recoveryClaims() ca.RecoveryClaims {
	return ca.RecoveryClaims{
		TokenID: "0192f0c1-0000-7000-8000-0000000000bb", NodeID: nodeID, NodeInstanceID: instance, Profile: "local",
		KeySHA256: bytes.Repeat([]byte{7}, 32), IssuedAt: time.Unix(1_700_000_000, 0), Era: 3,
	}
}

// A recovery token is signed by the provisioner's key, and the authority itself accepts it nowhere.
func TestARecoveryTokenIsOfNoUseAtTheAuthority(t *testing.T) {
	authority := open(t)
	tokens := recoveryTokens(t, authority, td)
	text, err := tokens.Sign(recoveryClaims())
	if err != nil {
		t.Fatal(err)
	}
	if got, err := tokens.Verify(text); err != nil || cmp.Diff(recoveryClaims(), got) != "" {
		t.Fatalf("%+v %v", got, err)
	}
	csr, err := pki.NewCSR(p256(t), pki.NodeID(td, nodeID))
	if err != nil {
		t.Fatal(err)
	}
	encoded := string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: csr}))
	for _, ott := range []string{text, strings.TrimPrefix(text, ca.RecoveryPrefix)} {
		body, err := json.Marshal(map[string]string{"csr": encoded, "ott": ott})
		if err != nil {
			t.Fatal(err)
		}
		answer := httptest.NewRecorder()
		authority.Handler().ServeHTTP(answer, httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/1.0/sign",
			bytes.NewReader(body)))
		if answer.Code/100 == 2 {
			t.Errorf("the authority answered %d: %s", answer.Code, answer.Body)
		}
	}
}

// Other keys, other meshes and other tokens are refused.
func TestOtherTokensAreNoRecoveryTokens(t *testing.T) {
	authority := open(t)
	tokens := recoveryTokens(t, authority, td)
	text, err := recoveryTokens(t, open(t), td).Sign(recoveryClaims())
	if err != nil {
		t.Fatal(err)
	}
	_, err = tokens.Verify(text)
	if other, ok := errors.AsType[*ca.UnknownKeyError](err); !ok || other.TokenID != recoveryClaims().TokenID ||
		other.KeyID == tokens.KeyID() {
		t.Errorf("of another key: %v", err)
	}
	if text, err = recoveryTokens(t, authority, "other.test").Sign(recoveryClaims()); err != nil {
		t.Fatal(err)
	}
	if _, err := tokens.Verify(text); !fault.Has(err, commonv1.Reason_REASON_TOKEN_INVALID) {
		t.Errorf("of another mesh: %v", err)
	}
	if _, ok := authority.ProvisionerKey().(*ecdsa.PrivateKey); !ok {
		t.Error("the provisioner's key is no ECDSA key")
	}
}
