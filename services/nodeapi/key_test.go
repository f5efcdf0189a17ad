package nodeapi_test

import (
	"bytes"
	"crypto/sha256"
	"testing"
)

// TestTheKeyIsSentToRecovery opens over TLS: recovery is told the key that the handshake proved, to compare it with the
// one it certified.
func TestTheKeyIsSentToRecovery(t *testing.T) {
	k := newKit(t)
	a := k.session(k.replica())
	want := sha256.Sum256(a.cert.Leaf.RawSubjectPublicKeyInfo)
	opened := k.backend.Opened()
	if len(opened) != 1 || !bytes.Equal(opened[0].GetKeySha256(), want[:]) {
		t.Errorf("opened with %v", opened)
	}
}
