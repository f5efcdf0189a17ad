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

// follower makes the next issuer of services, and returns it with the cross certificate that the one before has issued.
func follower(t *testing.T, services *ca.ServiceCA) pki.RootLink {
	t.Helper()
	before := services.Root()
	must(t, services.Next())
	bundle, err := services.Bundle()
	must(t, err)
	_, crosses := bundle.Given()
	for _, cross := range crosses {
		if pki.Vouches(before, services.Root(), cross) {
			return pki.RootLink{DER: services.Root().Raw, Cross: cross.Raw}
		}
	}
	t.Fatal("no cross certificate of the next root")
	return pki.RootLink{}
}

// issuers are two roots of services, of which the first vouches for the second.
func issuers(t *testing.T) [2]pki.RootLink {
	t.Helper()
	services, err := ca.OpenServiceCA(t.TempDir(), "mesh.test")
	must(t, err)
	first := services.Root()
	return [2]pki.RootLink{{DER: first.Raw}, follower(t, services)}
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

// trusting makes s the store of an enrolled node that trusts some roots.
func (w *world) trusting(s *identity.Store, roots ...[]byte) {
	w.t.Helper()
	key, err := s.PendingKey()
	must(w.t, err)
	answer := w.answer(key)
	bundle := pki.EncodeChain(roots)
	answer.Profile.CaBundlePem, answer.Profile.RecoveryCaBundlePem = bundle, bundle
	must(w.t, s.CommitEnrolment(token, answer))
}

// bundles are the names of the two trust bundles.
var bundles = []string{"ca-bundle.crt", "recovery-ca-bundle.crt"}

// wantRoots checks which roots both trust bundles have.
func (w *world) wantRoots(what string, want ...[]byte) {
	w.t.Helper()
	for _, name := range bundles {
		if got := w.trusts(name); !bytes.Equal(got, pki.EncodeChain(want)) {
			w.t.Errorf("%s: %s has the roots %q, want %q", what, name, rootIDs(w.t, got), rootIDs(w.t, pki.EncodeChain(want)))
		}
	}
}

func rootIDs(t *testing.T, bundle []byte) []string {
	t.Helper()
	certs, err := pki.DecodeCertificates(bundle)
	must(t, err)
	out := make([]string, len(certs))
	for i, cert := range certs {
		out[i] = pki.RootID(cert)
	}
	return out
}

func retired(link pki.RootLink) pki.RootLink {
	link.Retired = true
	return link
}

func (w *world) trusts(name string) []byte {
	w.t.Helper()
	data, err := os.ReadFile(filepath.Join(w.dirs.Etc, name))
	must(w.t, err)
	return data
}

// TestRootsOfServicesAreFollowed: both bundles take the next root and drop the retired one, and a list that does not
// follow from a present root changes nothing.
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
		w.wantRoots(what, want...)
	}
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

// TestRootsThatAHostileListBroughtGo: the holder of the key of an issuer makes an agent trust a root of his own by a
// list. The next list of the control plane drops it from both bundles.
func TestRootsThatAHostileListBroughtGo(t *testing.T) {
	dir, copied := t.TempDir(), t.TempDir()
	services, err := ca.OpenServiceCA(dir, "mesh.test")
	must(t, err)
	issuer := pki.RootLink{DER: services.Root().Raw}
	must(t, os.CopyFS(copied, os.DirFS(dir)))
	next := follower(t, services)
	leaked, err := ca.OpenServiceCA(copied, "mesh.test")
	must(t, err)
	hostile := follower(t, leaked)
	rotated := []pki.RootLink{retired(issuer), next}

	for name, lists := range map[string][][]pki.RootLink{
		"at once":                     {{issuer, hostile}, rotated},
		"before the next is there":    {{issuer, hostile}, {issuer}, {issuer, next}, rotated},
		"twice":                       {{issuer, hostile}, {issuer, next}, {issuer, hostile, next}, rotated},
		"beside the next":             {{issuer, next, hostile}, rotated},
		"with the issuer retired":     {{retired(issuer), next, hostile}, rotated},
		"after the issuer is retired": {{issuer, hostile}, rotated, {retired(issuer), next, hostile}},
	} {
		w := newWorld(t)
		s := w.open()
		w.trusting(s, issuer.DER)
		for _, list := range lists {
			_, err := s.TakeServiceRoots(list)
			must(t, err)
			w.close(s)
			s = w.open()
		}
		w.close(s)
		w.wantRoots(name, next.DER)
	}
}

// TestRootsThatWereGivenStay: enrolment, an operator's bundle and a file that was written make roots that no list
// brought, though a list had brought them before. So does a record of lists that is missing or lost.
func TestRootsThatWereGivenStay(t *testing.T) {
	a := rootsOfServices(t)
	first, second := a[0], a[1]
	for name, test := range map[string]struct {
		give func(w *world, s *identity.Store)
		want [][]byte
	}{
		"nothing": {func(*world, *identity.Store) {}, [][]byte{first.DER}},
		"enrolment": {
			func(w *world, s *identity.Store) { w.trusting(s, first.DER, second.DER) }, [][]byte{first.DER, second.DER},
		},
		"a bundle": {func(w *world, s *identity.Store) {
			dir := w.bundle("gbt_other")
			for _, name := range bundles {
				must(t, os.WriteFile(filepath.Join(dir, name), pki.EncodeChain([][]byte{first.DER, second.DER}), 0o600))
			}
			must(t, s.InstallBundle(w.read(dir)))
		}, [][]byte{first.DER, second.DER}},
		"files": {func(w *world, _ *identity.Store) {
			for _, name := range bundles {
				path := filepath.Join(w.dirs.Etc, name)
				must(t, os.WriteFile(path, pki.EncodeChain([][]byte{second.DER, first.DER}), 0o600))
			}
		}, [][]byte{second.DER, first.DER}},
		"no record": {func(w *world, _ *identity.Store) {
			must(t, os.Remove(filepath.Join(w.dirs.State, "service-roots.json")))
		}, [][]byte{first.DER, second.DER}},
		"a lost record": {func(w *world, _ *identity.Store) {
			must(t, os.WriteFile(filepath.Join(w.dirs.State, "service-roots.json"), []byte("{"), 0o600))
		}, [][]byte{first.DER, second.DER}},
	} {
		w := newWorld(t)
		s := w.open()
		w.trusting(s, first.DER)
		_, err := s.TakeServiceRoots([]pki.RootLink{first, second})
		must(t, err)
		test.give(w, s)
		w.close(s)
		s = w.open()
		_, err = s.TakeServiceRoots([]pki.RootLink{first})
		must(t, err)
		w.close(s)
		w.wantRoots(name, test.want...)
	}
}
