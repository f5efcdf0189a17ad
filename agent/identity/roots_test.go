package identity_test

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/gpuaas/mesh/agent/identity"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/pki/ca"
)

// issuers are two roots of services, of which the first vouches for the second.
func issuers(t *testing.T) [2]pki.RootLink {
	t.Helper()
	services, err := ca.OpenServiceCA(t.TempDir(), "mesh.test")
	must(t, err)
	first := services.Root()
	must(t, services.Next())
	bundle, err := services.Bundle()
	must(t, err)
	out := [2]pki.RootLink{{DER: first.Raw}, {DER: services.Root().Raw}}
	_, crosses := bundle.Given()
	for _, cross := range crosses {
		if pki.Vouches(first, services.Root(), cross) {
			out[1].Cross = cross.Raw
		}
	}
	if out[1].Cross == nil {
		t.Fatal("no cross certificate of the second root")
	}
	return out
}

var (
	madeRoots   sync.Once
	sharedRoots [2]pki.RootLink
)

// rootsOfServices returns issuers that are made once.
func rootsOfServices(t *testing.T) [2]pki.RootLink {
	t.Helper()
	madeRoots.Do(func() { sharedRoots = issuers(t) })
	return sharedRoots
}

// trusting makes a store an enrolled node's that trusts one root.
func (w *world) trusting(s *identity.Store, root []byte) {
	w.t.Helper()
	key, err := s.PendingKey()
	must(w.t, err)
	answer := w.answer(key)
	answer.Profile.CaBundlePem, answer.Profile.RecoveryCaBundlePem = pki.EncodeChain([][]byte{root}), pki.EncodeChain([][]byte{root})
	must(w.t, s.CommitEnrolment(token, answer))
}

func (w *world) trusts(name string) []byte {
	w.t.Helper()
	data, err := os.ReadFile(filepath.Join(w.dirs.Etc, name))
	must(w.t, err)
	return data
}

// TestRootsOfServicesAreFollowed: both bundles take the next root and drop the one that is retired, and what does not lead from a root held changes
// nothing.
func TestRootsOfServicesAreFollowed(t *testing.T) {
	w := newWorld(t)
	s := w.open()
	defer w.close(s)
	list, other := issuers(t), issuers(t)
	first, second := list[0], list[1]
	w.trusting(s, first.DER)

	check := func(what string, links []pki.RootLink, refusal string, want ...[]byte) {
		t.Helper()
		_, err := s.TakeServiceRoots(links)
		if refusal == "" && err != nil || refusal != "" && (err == nil || !strings.Contains(err.Error(), refusal)) {
			t.Errorf("%s: error %v, want %q", what, err, refusal)
		}
		for _, name := range []string{"ca-bundle.crt", "recovery-ca-bundle.crt"} {
			if got := w.trusts(name); !bytes.Equal(got, pki.EncodeChain(want)) {
				t.Errorf("%s: %s is not what is to be trusted:\n%s", what, name, got)
			}
		}
	}
	retired := func(l pki.RootLink) pki.RootLink { l.Retired = true; return l }
	check("no roots", nil, "a list of 0 roots", first.DER)
	check("roots of another", other[:], "no root that is trusted", first.DER)
	check("a list that leaves none", []pki.RootLink{retired(first)}, "would leave no root", first.DER)
	check("all retired", []pki.RootLink{retired(first), retired(second)}, "would leave no root", first.DER)
	unvouched := second
	unvouched.Cross = other[1].Cross
	check("a root without its cross certificate", []pki.RootLink{first, unvouched, other[0]}, "", first.DER)
	check("many", make([]pki.RootLink, pki.MaxChain+1), "a list of 65 roots", first.DER)
	check("the next", []pki.RootLink{first, second}, "", first.DER, second.DER)
	check("the former retired", []pki.RootLink{retired(first), second}, "", second.DER)
	check("again", []pki.RootLink{retired(first), second}, "", second.DER)
	check("the former alone", []pki.RootLink{first}, "no root that is trusted", second.DER)
}
