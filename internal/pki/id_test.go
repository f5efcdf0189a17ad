package pki_test

import (
	"crypto/ed25519"
	"crypto/rand"
	"errors"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/gpuaas/mesh/internal/pki"
)

func TestParseIDAcceptsOneSpelling(t *testing.T) {
	good := []pki.ID{pki.NodeID("mesh.test", "0192f0c1-0000-7000-8000-000000000001"), pki.ServiceID("a-b_c.9", "recovery")}
	for _, id := range good {
		got, err := pki.ParseID(id.String())
		if err != nil || got != id {
			t.Errorf("%s: %v, %v", id, got, err)
		}
		if id.URL().String() != id.String() {
			t.Errorf("%s as a URL is %s", id, id.URL())
		}
	}
	bad := []string{
		"", "spiffe://", "spiffe://mesh.test", "spiffe://mesh.test/node", "spiffe://mesh.test/node/",
		"spiffe://mesh.test/node/a/b", "spiffe://mesh.test//node/a", "spiffe://mesh.test/node/a/",
		"spiffe://MESH.test/node/a", "SPIFFE://mesh.test/node/a", "https://mesh.test/node/a", "spiffe://mesh.test/user/a",
		"spiffe://mesh.test/node/..", "spiffe://mesh.test/node/a%2fb", "spiffe://mesh.test/node/a?x",
		"spiffe://mesh.test/node/a#x", "spiffe://u@mesh.test/node/a", "spiffe://mesh.test:1/node/a",
		"spiffe://mesh.test/node/ä", "spiffe://mesh.test/node/a b", "spiffe://mesh.test/node/a\n", "spiffe:///node/a",
		"spiffe://.test/node/a",
		"spiffe://mesh.test/node/" + strings.Repeat("a", 300),
	}
	for _, raw := range bad {
		if id, err := pki.ParseID(raw); !errors.Is(err, pki.ErrID) {
			t.Errorf("%q was read as %v (%v)", raw, id, err)
		}
	}
}

func FuzzParseID(f *testing.F) {
	f.Add("spiffe://mesh.test/node/a")
	f.Fuzz(func(t *testing.T, raw string) {
		id, err := pki.ParseID(raw)
		if err == nil && id.String() != raw {
			t.Errorf("%q was read as %q", raw, id)
		}
	})
}

func TestKeySets(t *testing.T) {
	pub := func() ed25519.PublicKey {
		public, _, err := ed25519.GenerateKey(rand.Reader)
		if err != nil {
			t.Fatal(err)
		}
		return public
	}
	old, next := pub(), pub()
	both, err := pki.NewKeySet(old, next)
	if err != nil {
		t.Fatal(err)
	}
	again, err := pki.ParseKeySet(" " + strings.ReplaceAll(both.String(), ",", " ,\n") + ",")
	if err != nil || again.String() != both.String() {
		t.Errorf("%v, %v", again, err)
	}
	onlyOld, err := pki.NewKeySet(old)
	if err != nil {
		t.Fatal(err)
	}
	entry := onlyOld.String()
	first := "0" // another digit than the id's first
	if entry[:1] == first {
		first = "1"
	}
	for _, bad := range []string{
		"", ",", "x", "x:", ":" + entry, entry[:len(entry)-4], first + entry[1:],
		strings.Replace(entry, ":", ":!", 1),
	} {
		if _, err := pki.ParseKeySet(bad); err == nil {
			t.Errorf("%q was read", bad)
		}
	}
	var none *pki.KeySet
	if none.Has(pki.KeyID(old)) {
		t.Error("a nil set holds a key")
	}
}

func TestSigningKeysAreMadeOnce(t *testing.T) {
	path := filepath.Join(t.TempDir(), "keys", "task.pem")
	keys := make([]ed25519.PrivateKey, 8)
	var wg sync.WaitGroup
	for i := range keys {
		wg.Go(func() {
			key, err := pki.LoadOrCreateSigningKey(path)
			if err != nil {
				t.Error(err)
			}
			keys[i] = key
		})
	}
	wg.Wait()
	for _, key := range keys {
		if !key.Equal(keys[0]) {
			t.Fatal("several keys were made")
		}
	}
}
