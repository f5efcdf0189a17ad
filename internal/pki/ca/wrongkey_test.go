package ca_test

import (
	"bytes"
	"encoding/pem"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/uuid"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/pki/ca"
)

// An issuer whose file has the key of another one is not there: its signatures would be refused everywhere.
func TestAnIssuerWithAnotherKeyIsNotFound(t *testing.T) {
	dir := t.TempDir()
	open := func() *ca.Embedded {
		t.Helper()
		out, err := ca.Open(ca.Config{Dir: dir, TrustDomain: "mesh.test", Follows: true})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = out.Close() })
		if err := out.Use(""); err != nil {
			t.Fatal(err)
		}
		return out
	}
	first := open()
	var blocks [2][]*pem.Block // of the issuers' files
	var paths [2]string
	var issuers [2]ca.Issuer
	for i := range issuers {
		id := uuid.NewString()
		var err error
		if issuers[i], err = first.Prepare(id, false); err != nil {
			t.Fatal(err)
		}
		paths[i] = filepath.Join(dir, "issuer-"+id+".pem")
		rest, err := os.ReadFile(paths[i])
		if err != nil {
			t.Fatal(err)
		}
		for {
			var block *pem.Block
			if block, rest = pem.Decode(rest); block == nil {
				break
			}
			blocks[i] = append(blocks[i], block)
		}
	}
	var mixed bytes.Buffer
	for i, block := range blocks[0] {
		if block.Type == "PRIVATE KEY" {
			block = blocks[1][i]
		}
		if err := pem.Encode(&mixed, block); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(paths[0], mixed.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	again := open()
	if _, err := again.Find(pki.Fingerprint(issuers[0].Certificate)); !fault.Has(err,
		commonv1.Reason_REASON_CERTIFICATE_AUTHORITY_UNAVAILABLE) {
		t.Errorf("with the key of another issuer: %v", err)
	}
	if _, err := again.Find(pki.Fingerprint(issuers[1].Certificate)); err != nil {
		t.Errorf("the other issuer: %v", err)
	}
}
