package ca_test

import (
	"crypto/tls"
	"crypto/x509"
	"path/filepath"
	"testing"
	"time"

	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/pki/ca"
)

// reaches makes a connection between a server with a store and a client that trusts roots.
func reaches(t *testing.T, store *pki.Store, roots *pki.Bundle) error {
	t.Helper()
	const domain = "mesh.test"
	server, err := pki.ServerTLS(pki.ServerConfig{Store: store, TrustDomain: domain})
	if err != nil {
		t.Fatal(err)
	}
	client, err := pki.ClientTLS(pki.ClientConfig{Roots: roots, Server: pki.ServiceID(domain, "nodeapi")})
	if err != nil {
		t.Fatal(err)
	}
	port, err := tls.Listen("tcp", "127.0.0.1:0", server)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		conn, err := port.Accept()
		if err != nil {
			return
		}
		defer conn.Close()
		_, _ = conn.Read(make([]byte, 1)) // ends with the client
	}()
	conn, err := tls.Dial("tcp", port.Addr().String(), client)
	if err == nil {
		_ = conn.Close()
	}
	_ = port.Close()
	<-done
	return err
}

// TestNextIssuer makes two further roots. A client that trusts the first alone reaches a server of the third by the
// cross certificates that the server presents, and comes to trust the third by them.
func TestNextIssuer(t *testing.T) {
	dir := t.TempDir()
	services, err := ca.OpenServiceCA(filepath.Join(dir, "ca"), "mesh.test")
	if err != nil {
		t.Fatal(err)
	}
	first := services.Root()
	old, err := pki.NewBundle(first)
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := services.Next(); err != nil {
			t.Fatal(err)
		}
	}
	opened, err := ca.OpenServiceCA(filepath.Join(dir, "ca"), "mesh.test")
	if err != nil || !opened.Root().Equal(services.Root()) || opened.Root().Equal(first) {
		t.Fatalf("opened again it issues by another root: %v", err)
	}
	full, err := opened.Bundle()
	if err != nil {
		t.Fatal(err)
	}
	roots, crosses := full.Given()
	if len(roots) != 3 || len(crosses) != 2 || len(full.Roots()) != 3 {
		t.Fatalf("%d roots and %d cross certificates", len(roots), len(crosses))
	}
	store, err := opened.Issue("nodeapi", time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	if err := reaches(t, store, old); err == nil {
		t.Error("without cross certificates who trusts the first root alone takes a certificate of the third")
	}
	links := []pki.RootLink{
		{DER: roots[0].Raw},
		{DER: roots[1].Raw, Cross: crosses[0].Raw},
		{DER: roots[2].Raw, Cross: crosses[1].Raw},
	}
	if err := store.Follow(func([]*x509.Certificate) [][]byte { return pki.CrossChain(opened.Root(), links) },
		nil); err != nil {
		t.Fatal(err)
	}
	if err := reaches(t, store, old); err != nil {
		t.Errorf("with cross certificates: %v", err)
	}
	if err := reaches(t, store, full); err != nil {
		t.Errorf("who trusts all: %v", err)
	}
	chain, err := store.Chain()
	if err != nil || len(chain) != 1 {
		t.Fatalf("the chain is %d long: %v", len(chain), err)
	}
	if anchor, err := pki.Anchor(chain, roots); err != nil || !anchor.Equal(opened.Root()) {
		t.Errorf("the anchor is another: %v", err)
	}

	for name, test := range map[string]struct {
		links []pki.RootLink
		next  int
	}{
		"both follow":          {links: links, next: 3},
		"in any order":         {links: []pki.RootLink{links[2], links[1], links[0]}, next: 3},
		"the first is retired": {links: []pki.RootLink{{DER: links[0].DER, Retired: true}, links[1], links[2]}, next: 3},
		"a link is missing":    {links: []pki.RootLink{links[0], links[2]}, next: 1},
		"another's cross":      {links: []pki.RootLink{links[0], {DER: links[1].DER, Cross: links[2].Cross}}, next: 1},
		"no cross":             {links: []pki.RootLink{links[0], {DER: links[1].DER}}, next: 1},
		"it leads from none":   {links: []pki.RootLink{links[2]}, next: 1},
	} {
		if next := pki.FollowRoots([]*x509.Certificate{first}, test.links); len(next) != test.next {
			t.Errorf("%s: %d roots, want %d", name, len(next), test.next)
		}
	}
	if err := opened.Forget(); err != nil {
		t.Fatal(err)
	}
	if left, err := pki.LoadBundle(filepath.Join(dir, "ca", ca.RootsFile)); err != nil || len(left.Roots()) != 1 ||
		!left.Roots()[0].Equal(opened.Root()) {
		t.Errorf("what is left after the others were taken off: %v", err)
	}
}

// TestNextIssuerThatWasInterrupted: a root whose entry in the file of roots was not written gets it when the authority
// is opened again.
func TestNextIssuerThatWasInterrupted(t *testing.T) {
	dir := t.TempDir()
	services, err := ca.OpenServiceCA(dir, "mesh.test")
	if err != nil {
		t.Fatal(err)
	}
	before := services.Roots()
	if err := services.Next(); err != nil {
		t.Fatal(err)
	}
	if err := pki.WriteFile(filepath.Join(dir, ca.RootsFile), pki.EncodeCertificates(before)); err != nil {
		t.Fatal(err)
	}
	opened, err := ca.OpenServiceCA(dir, "mesh.test")
	if err != nil {
		t.Fatal(err)
	}
	left, err := pki.LoadBundle(filepath.Join(dir, ca.RootsFile))
	if err != nil {
		t.Fatal(err)
	}
	roots, crosses := left.Given()
	if len(roots) != 2 || !roots[1].Equal(opened.Root()) || len(crosses) != 1 ||
		!pki.Vouches(roots[0], roots[1], crosses[0]) {
		t.Errorf("opened again: %d roots and %d cross certificates, want 2 and 1 of the first root", len(roots), len(crosses))
	}
}

// TestTwoOfOneServiceAuthority: a change that one opened authority makes in the directory survives a change by another
// one.
func TestTwoOfOneServiceAuthority(t *testing.T) {
	dir := t.TempDir()
	var both [2]*ca.ServiceCA
	for i := range both {
		var err error
		if both[i], err = ca.OpenServiceCA(dir, "mesh.test"); err != nil {
			t.Fatal(err)
		}
	}
	for _, services := range both {
		if err := services.Next(); err != nil {
			t.Fatal(err)
		}
	}
	left, err := pki.LoadBundle(filepath.Join(dir, ca.RootsFile))
	if err != nil {
		t.Fatal(err)
	}
	if roots, crosses := left.Given(); len(roots) != 3 || len(crosses) != 2 {
		t.Errorf("after Next of each: %d roots and %d cross certificates, want 3 and 2", len(roots), len(crosses))
	}
	if err := both[0].Forget(); err != nil {
		t.Fatal(err)
	}
	if roots := both[0].Roots(); len(roots) != 2 || !both[0].Root().Equal(both[1].Root()) {
		t.Errorf("after Forget of the first: %d certificates, want the newest root and its cross certificate", len(roots))
	}
}
