package ca_test

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/pki/ca"
)

func openIn(t *testing.T, dir string, follows bool) *ca.Embedded {
	t.Helper()
	authority, err := ca.Open(ca.Config{Dir: dir, TrustDomain: td, Follows: follows})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = authority.Close() })
	return authority
}

// accepted verifies a chain as an ingress with these roots does.
func accepted(t *testing.T, chain [][]byte, roots ...ca.Issuer) error {
	t.Helper()
	bundle, err := pki.NewBundle(roots[0].Root)
	if err != nil {
		t.Fatal(err)
	}
	_, err = pki.VerifyClientChain(chain, pki.Trust{Kind: pki.KindNode, Bundle: bundle}, td, time.Now())
	return err
}

// TestExchangeOfTheIssuer: replicas of one directory prepare the same issuer, and sign with it once they are told to.
// An ingress that trusts the former root alone accepts the next issuer's certificates by their cross certificate.
func TestExchangeOfTheIssuer(t *testing.T) {
	for _, withRoot := range []bool{false, true} {
		dir, id := t.TempDir(), ids.New()
		first, second := openIn(t, dir, false), openIn(t, dir, false)
		before, err := first.Find("")
		if err != nil {
			t.Fatal(err)
		}
		next, err := first.Prepare(id, withRoot)
		if err != nil {
			t.Fatal(err)
		}
		again, err := second.Prepare(id, withRoot)
		if err != nil || !again.Certificate.Equal(next.Certificate) {
			t.Fatalf("the other replica prepared another issuer: %v", err)
		}
		if next.Certificate.Equal(before.Certificate) || next.Root.Equal(before.Root) == withRoot {
			t.Fatalf("with root %t: the issuer is %s under %s", withRoot, next.Certificate.Subject, next.Root.Subject)
		}
		csr, err := pki.NewCSR(p256(t), pki.NodeID(td, nodeID))
		if err != nil {
			t.Fatal(err)
		}
		fingerprint := pki.Fingerprint(next.Certificate)
		probe, err := second.SignWith(t.Context(), fingerprint, ca.SignRequest{CSR: csr, NodeID: nodeID, TTL: time.Hour})
		if err != nil || accepted(t, probe.Chain, next) != nil || accepted(t, probe.Chain, before) == nil == withRoot {
			t.Fatalf("with root %t: signed beside: %v, next root %v, former root %v", withRoot, err,
				accepted(t, probe.Chain, next), accepted(t, probe.Chain, before))
		}
		if err := second.Use(fingerprint); err != nil {
			t.Fatal(err)
		}
		issued, err := sign(t, second, csr, time.Hour)
		if err != nil || accepted(t, issued.Chain, next) != nil || accepted(t, issued.Chain, before) != nil {
			t.Fatalf("with root %t: signed: %v, next root %v, former root %v", withRoot, err,
				accepted(t, issued.Chain, next), accepted(t, issued.Chain, before))
		}
		if pki.FingerprintDER(issued.Chain[1]) != fingerprint {
			t.Error("the certificate behind the leaf is not its issuer")
		}
		// The first replica has not been told.
		signing, err := first.SigningFingerprint(t.Context())
		if err != nil || signing != pki.Fingerprint(before.Certificate) {
			t.Errorf("the other replica signs with %s: %v", signing, err)
		}
		// A replica that starts later finds the issuer, and its roots are those of both.
		later := openIn(t, dir, true)
		if err := later.Use(fingerprint); err != nil {
			t.Fatal(err)
		}
		roots, err := later.Roots(t.Context())
		if err != nil || !roots[0].Equal(next.Root) || !slices.ContainsFunc(roots, before.Root.Equal) {
			t.Errorf("roots: %v, %v", roots, err)
		}
	}
}

// TestNothingIsSignedByAnotherIssuer: an authority that follows signs with nothing before it is told with what, and not
// while it lacks what it is told.
func TestNothingIsSignedByAnotherIssuer(t *testing.T) {
	dir := t.TempDir()
	authority := openIn(t, dir, true)
	csr, err := pki.NewCSR(p256(t), pki.NodeID(td, nodeID))
	if err != nil {
		t.Fatal(err)
	}
	refused := func(when string) {
		t.Helper()
		if _, err := sign(t, authority, csr, time.Hour); !fault.Has(err,
			commonv1.Reason_REASON_CERTIFICATE_AUTHORITY_UNAVAILABLE) {
			t.Errorf("%s: %v", when, err)
		}
	}
	refused("before it is told")
	if err := authority.Use(""); err != nil {
		t.Fatal(err)
	}
	if _, err := sign(t, authority, csr, time.Hour); err != nil {
		t.Fatal(err)
	}
	next, err := authority.Prepare(ids.New(), true)
	if err != nil {
		t.Fatal(err)
	}
	fingerprint := pki.Fingerprint(next.Certificate)
	paths, err := filepath.Glob(filepath.Join(dir, "issuer-*.pem"))
	if err != nil || len(paths) != 1 {
		t.Fatalf("%v, %v", paths, err)
	}
	away := filepath.Join(t.TempDir(), "away.pem")
	if err := os.Rename(paths[0], away); err != nil {
		t.Fatal(err)
	}
	if err := authority.Use(fingerprint); err == nil {
		t.Error("it uses an issuer that it does not have")
	}
	refused("without the issuer")
	if err := errors.Join(os.Rename(away, paths[0]), authority.Use(fingerprint)); err != nil {
		t.Fatal(err)
	}
	if _, err := sign(t, authority, csr, time.Hour); err != nil {
		t.Errorf("once the file is there: %v", err)
	}
	for _, id := range []string{"", "../x", "A" + ids.New()[1:]} {
		if _, err := authority.Prepare(id, false); err == nil {
			t.Errorf("an issuer of the id %q was made", id)
		}
	}
}
