package identity

import (
	"bytes"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path/filepath"
	"slices"

	"github.com/gpuaas/mesh/agent/identity/envfile"
	"github.com/gpuaas/mesh/internal/pki"
)

// ErrRootsUnrelated refuses a list of roots of services of which none is trusted.
var ErrRootsUnrelated = errors.New("the list names no root that is trusted")

// RootsRefusedError refuses a list of roots of services.
type RootsRefusedError struct{ Reason string }

func (e *RootsRefusedError) Error() string { return e.Reason }

// listed is a trust bundle that a list has changed, as service-roots.json keeps it.
type listed struct {
	// Given are the roots that enrolment or an operator gave and no list has retired, as DER.
	Given [][]byte `json:"given"`
	// SHA256 is the digest of the bundle that was written. A bundle with another digest was given since.
	SHA256 string `json:"sha256"`
}

// listedBundles maps the names of bundles' files to their records. A bundle without one is as it was given.
type listedBundles map[file]listed

// given returns the given roots among those in a bundle.
func (l listedBundles) given(f file, bundle []byte, held []*x509.Certificate) []*x509.Certificate {
	record, ok := l[f]
	if !ok || record.SHA256 != digest(bundle) {
		return held
	}
	return slices.DeleteFunc(slices.Clone(held), func(root *x509.Certificate) bool {
		return !slices.ContainsFunc(record.Given, func(der []byte) bool { return bytes.Equal(der, root.Raw) })
	})
}

func digest(data []byte) string {
	sum := sha256.Sum256(data)
	return hex.EncodeToString(sum[:])
}

// change returns the change that makes the record durable.
func (l listedBundles) change() change {
	if len(l) == 0 {
		return change{File: fileServiceRoots, Remove: true}
	}
	data, _ := json.Marshal(l) // texts and bytes are always encoded
	return change{File: fileServiceRoots, Content: data}
}

// givenLocked returns the record without the bundles that are given now, and the changes that make it durable.
func (s *Store) givenLocked(files ...file) (listedBundles, []change) {
	next := maps.Clone(s.listed)
	for _, f := range files {
		delete(next, f)
	}
	if len(next) == len(s.listed) {
		return next, nil
	}
	return next, []change{next.change()}
}

// TakeServiceRoots makes the roots of services durable that follow from those given by a list of the control plane, and
// reports whether a file changed. The list takes the place of those before it: a root that an earlier list brought and
// this one lacks is dropped, as are those that it calls retired. Each of the two trust bundles follows from its own
// roots, and both change or none does; a bundle for enrolment of which the list names no root stays, as does one that
// an operator pinned in a file of its own. The error is ErrRootsUnrelated or a *RootsRefusedError where the list is not
// followed; another one means that it could not be stored. With an error the previous bundles stay on disk.
func (s *Store) TakeServiceRoots(links []pki.RootLink) (bool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.finishChangeLocked(); err != nil {
		return false, err
	}
	files := []file{fileBundle}
	own := filepath.Base(s.path(fileRecoveryBundle))
	if path := s.env.Get(envfile.RecoveryBundle); path == "" || filepath.Base(path) == own {
		files = append(files, fileRecoveryBundle)
	}
	var changes []change
	record := listedBundles{}
	maps.Copy(record, s.listed)
	for _, f := range files {
		old, err := pki.ReadFile(s.path(f))
		if errors.Is(err, fs.ErrNotExist) && f == fileRecoveryBundle {
			continue // the one bundle trusts both listeners
		}
		if err != nil {
			return false, fmt.Errorf("read trust bundle: %w", err)
		}
		held, err := rootsOf(old)
		if err != nil {
			return false, fmt.Errorf("%s: %w", filepath.Base(s.path(f)), err)
		}
		given := s.listed.given(f, old, held)
		next, err := followRoots(given, held, links)
		if f == fileRecoveryBundle && errors.Is(err, ErrRootsUnrelated) {
			continue // the enrolment listener has roots of its own
		}
		if err != nil {
			return false, fmt.Errorf("%s: %w", filepath.Base(s.path(f)), err)
		}
		if slices.EqualFunc(next, held, (*x509.Certificate).Equal) {
			continue
		}
		content := pki.EncodeCertificates(next)
		entry := listed{SHA256: digest(content)}
		for _, root := range given {
			if slices.ContainsFunc(next, root.Equal) {
				entry.Given = append(entry.Given, root.Raw)
			}
		}
		record[f] = entry
		changes = append(changes, change{File: f, Content: content})
	}
	if len(changes) == 0 {
		return false, nil
	}
	if err := s.commit("service_roots", append(changes, record.change())); err != nil {
		return false, fmt.Errorf("store trust bundle: %w", err)
	}
	s.listed = record
	return true, nil
}

// rootsOf returns the roots of a bundle. Its cross certificates are left out: one would be trusted as a root where that
// of the same key is retired. Services show them.
func rootsOf(bundle []byte) ([]*x509.Certificate, error) {
	certs, err := pki.DecodeCertificates(bundle)
	if err != nil {
		return nil, fmt.Errorf("read trust bundle: %w", err)
	}
	parsed, err := pki.NewBundle(certs...)
	if err != nil {
		return nil, fmt.Errorf("read trust bundle: %w", err)
	}
	held, _ := parsed.Given()
	return held, nil
}

// followRoots returns the roots to trust after a list: those given, those held that the list names, and those that
// follow from them, without the retired ones. A list that is empty, names no root that is trusted, or would leave none
// of its own, is refused.
func followRoots(given, held []*x509.Certificate, links []pki.RootLink) ([]*x509.Certificate, error) {
	if len(links) == 0 || len(links) > pki.MaxChain {
		return nil, &RootsRefusedError{Reason: fmt.Sprintf("a list of %d roots, want 1 to %d", len(links), pki.MaxChain)}
	}
	link := func(cert *x509.Certificate) int {
		return slices.IndexFunc(links, func(l pki.RootLink) bool { return bytes.Equal(l.DER, cert.Raw) })
	}
	if !slices.ContainsFunc(held, func(cert *x509.Certificate) bool { return link(cert) >= 0 }) {
		return nil, ErrRootsUnrelated
	}
	known := slices.DeleteFunc(slices.Clone(held), func(cert *x509.Certificate) bool {
		return link(cert) < 0 && !slices.ContainsFunc(given, cert.Equal)
	})
	good := 0
	next := slices.DeleteFunc(pki.FollowRoots(known, links), func(cert *x509.Certificate) bool {
		at := link(cert)
		if at >= 0 && !links[at].Retired {
			good++
		}
		return at >= 0 && links[at].Retired
	})
	if good == 0 {
		return nil, &RootsRefusedError{Reason: "the list would leave no root to trust"}
	}
	return next, nil
}
