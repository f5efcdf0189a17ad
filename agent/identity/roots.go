package identity

import (
	"bytes"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"

	"github.com/gpuaas/mesh/internal/pki"
)

// TakeServiceRoots makes the roots of services durable that follow from those trusted by a list of the control plane, without those that it calls retired,
// and reports whether a file changed. The two trust bundles follow each from its own roots, both or none of them; one that an operator pinned in a file of its own stays. With an
// error the bundle from before stays on disk.
func (s *Store) TakeServiceRoots(links []pki.RootLink) (bool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.settleLocked(); err != nil {
		return false, err
	}
	files := []file{fileBundle}
	if path := s.env.Get(EnvRecoveryBundle); path == "" || filepath.Base(path) == filepath.Base(s.path(fileRecoveryBundle)) {
		files = append(files, fileRecoveryBundle)
	}
	var changes []change
	for _, f := range files {
		old, err := pki.ReadFile(s.path(f))
		if errors.Is(err, fs.ErrNotExist) && f == fileRecoveryBundle {
			continue // the one bundle trusts both listeners
		}
		if err != nil {
			return false, fmt.Errorf("read trust bundle: %w", err)
		}
		next, err := followRoots(old, links)
		if f == fileRecoveryBundle && errors.Is(err, errUnrelated) {
			continue // enrolment is believed by roots of its own
		}
		if err != nil {
			return false, fmt.Errorf("%s: %w", filepath.Base(s.path(f)), err)
		}
		if next != nil {
			changes = append(changes, change{File: f, Content: next})
		}
	}
	if len(changes) == 0 {
		return false, nil
	}
	if err := s.commit("service_roots", changes); err != nil {
		return false, fmt.Errorf("store trust bundle: %w", err)
	}
	return true, nil
}

// errUnrelated refuses a list of roots of which none is trusted.
var errUnrelated = errors.New("the list names no root that is trusted")

// followRoots returns the bundle after a list: the roots held and those that follow from them, without the retired ones; nil: nothing changes. A list that
// is empty, names no root that is trusted, or would leave none of its own, is refused.
func followRoots(old []byte, links []pki.RootLink) ([]byte, error) {
	certs, err := pki.DecodeCertificates(old)
	if err != nil {
		return nil, fmt.Errorf("read trust bundle: %w", err)
	}
	bundle, err := pki.NewBundle(certs...)
	if err != nil {
		return nil, fmt.Errorf("read trust bundle: %w", err)
	}
	// Without its cross certificates: one would be trusted as a root where that of the same key is retired. Services show them.
	held, _ := bundle.Given()
	if len(links) == 0 || len(links) > pki.MaxChain {
		return nil, fmt.Errorf("a list of %d roots, want 1 to %d", len(links), pki.MaxChain)
	}
	link := func(cert *x509.Certificate) int {
		return slices.IndexFunc(links, func(l pki.RootLink) bool { return bytes.Equal(l.DER, cert.Raw) })
	}
	if !slices.ContainsFunc(held, func(cert *x509.Certificate) bool { return link(cert) >= 0 }) {
		return nil, errUnrelated
	}
	good := 0
	next := slices.DeleteFunc(pki.FollowRoots(held, links), func(cert *x509.Certificate) bool {
		at := link(cert)
		if at >= 0 && !links[at].Retired {
			good++
		}
		return at >= 0 && links[at].Retired
	})
	if good == 0 {
		return nil, errors.New("the list would leave no root to trust")
	}
	if slices.EqualFunc(next, held, (*x509.Certificate).Equal) {
		return nil, nil
	}
	return pki.EncodeCertificates(next), nil
}
