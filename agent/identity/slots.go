package identity

import (
	"bytes"
	"crypto"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"time"

	"github.com/gpuaas/mesh/agent/identity/envfile"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pki"
)

// ErrNotOurs is wrapped when an issued certificate is not for this node or not for the key of the request.
var ErrNotOurs = errors.New("the certificate is not for this node and the key of its request")

// PendingKey returns the key for the next request with an operator's token. The key is on disk before PendingKey
// returns it, and stays the same until a certificate for it is stored or it is dropped, so that the request after a
// lost reply is a retry of the same one. A renewal has a key of its own: if it used this one up after the reply to a
// bundle's token was lost, the same token would be sent with another key, as a thief would send it.
func (s *Store) PendingKey() (crypto.Signer, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.keyLocked(&s.pending, filePendingKey, "pending_key")
}

// RenewalKey returns the key for the next renewal, as PendingKey does for a request with an operator's token.
func (s *Store) RenewalKey() (crypto.Signer, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.keyLocked(&s.renewing, fileRenewingKey, "renewing_key")
}

// keyLocked returns the key that is held, or makes one and stores it.
func (s *Store) keyLocked(held *crypto.Signer, f file, operation string) (crypto.Signer, error) {
	if err := s.finishChangeLocked(); err != nil {
		return nil, err
	}
	if *held != nil {
		return *held, nil
	}
	key, err := pki.NewKey()
	if err != nil {
		return nil, err
	}
	encoded, err := pki.EncodeKey(key)
	if err != nil {
		return nil, err
	}
	if err := s.write(operation, f, encoded); err != nil {
		return nil, fmt.Errorf("store key of a request: %w", err)
	}
	*held = key
	return key, nil
}

// DropPendingKey gives up the key of a request that was refused for good: the next request has another one.
func (s *Store) DropPendingKey() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.dropKeyLocked(&s.pending, filePendingKey)
}

// DropRenewalKey gives up the key of a renewal that was refused for good: the next renewal has another one.
func (s *Store) DropRenewalKey() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.dropKeyLocked(&s.renewing, fileRenewingKey)
}

func (s *Store) dropKeyLocked(held *crypto.Signer, f file) error {
	if err := s.finishChangeLocked(); err != nil {
		return err
	}
	if err := s.remove("drop_key", f); err != nil {
		return err
	}
	*held = nil
	return nil
}

// StoreIssued puts a certificate for the pending key into the other slot, and the next recovery token, if there is one,
// into node-agent.env, unless an operator's token that was not used is there. The slot in use is untouched, and the
// former recovery token is kept until Confirm. A chain for another key or node is refused with ErrNotOurs.
func (s *Store) StoreIssued(chainPEM []byte, recoveryToken string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.finishChangeLocked(); err != nil {
		return err
	}
	if !envfile.Clean(recoveryToken) {
		return errors.New("store certificate: the recovery token is not text that can be kept")
	}
	if isOfChain(s.other, chainPEM) || isOfChain(s.current, chainPEM) {
		return nil
	}
	pair, keyPEM, err := s.pairLocked(chainPEM, s.renewing)
	if err != nil {
		return err
	}
	if node, err := nodeOf(pair.Leaf); err != nil || node.Name != s.node.NodeID {
		return fmt.Errorf("store certificate: %w", ErrNotOurs)
	}
	changes := []change{
		{File: fileNextKey, Content: keyPEM},
		{File: fileNextCert, Content: chainPEM},
		{File: fileRenewingKey, Remove: true},
	}
	env, tokens := s.freshEnvLocked(), s.tokens
	if recoveryToken != "" {
		env, tokens = s.offeredLocked(env, recoveryToken, pki.SerialString(pair.Leaf.SerialNumber))
		changes = append(append(changes, tokens.change()), changesOf(env)...)
	}
	if err := s.commit("issued", changes); err != nil {
		return err
	}
	s.other, s.env, s.tokens, s.renewing = pair, env, tokens, nil
	return nil
}

// Flip makes the other slot the one in use, durably. It is called before a session opens with the new certificate, and
// again to fall back.
func (s *Store) Flip() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.finishChangeLocked(); err != nil {
		return err
	}
	if s.other == nil {
		return errors.New("use the other certificate: none is held")
	}
	var changes []change
	for _, move := range []struct {
		pair      *tls.Certificate
		cert, key file
	}{{s.other, fileCert, fileKey}, {s.current, fileNextCert, fileNextKey}} {
		slot, err := slotChanges(move.pair, move.cert, move.key)
		if err != nil {
			return err
		}
		changes = append(changes, slot...)
	}
	if err := s.commit("flip", changes); err != nil {
		return err
	}
	s.current, s.other = s.other, s.current
	return nil
}

// slotChanges returns the changes that put a certificate and its key into a slot; nil empties the slot.
func slotChanges(pair *tls.Certificate, cert, key file) ([]change, error) {
	if pair == nil {
		return []change{{File: cert, Remove: true}, {File: key, Remove: true}}, nil
	}
	signer, ok := pair.PrivateKey.(crypto.Signer)
	if !ok {
		return nil, errors.New("keep a certificate: its key cannot sign")
	}
	keyPEM, err := pki.EncodeKey(signer)
	if err != nil {
		return nil, err
	}
	return []change{
		{File: key, Content: keyPEM}, {File: cert, Content: pki.EncodeChain(pair.Certificate)},
	}, nil
}

// pairLocked returns a chain as a certificate with the one of the keys that it is for, and that key in PEM.
func (s *Store) pairLocked(chainPEM []byte, keys ...crypto.Signer) (*tls.Certificate, []byte, error) {
	certs, err := pki.DecodeCertificates(chainPEM)
	if err != nil {
		return nil, nil, fmt.Errorf("store certificate: %w", err)
	}
	var key crypto.Signer
	for _, pending := range keys {
		if pending == nil {
			continue
		}
		public, err := x509.MarshalPKIXPublicKey(pending.Public())
		if err != nil {
			return nil, nil, fmt.Errorf("encode public key: %w", err)
		}
		if bytes.Equal(certs[0].RawSubjectPublicKeyInfo, public) {
			key = pending
		}
	}
	if key == nil {
		return nil, nil, fmt.Errorf("store certificate: no key of it is pending: %w", ErrNotOurs)
	}
	keyPEM, err := pki.EncodeKey(key)
	if err != nil {
		return nil, nil, err
	}
	pair := &tls.Certificate{PrivateKey: key, Leaf: certs[0]}
	for _, cert := range certs {
		pair.Certificate = append(pair.Certificate, cert.Raw)
	}
	return pair, keyPEM, nil
}

// isOfChain reports whether the chain's leaf is that of pair: the reply came twice, or was applied when an unfinished
// change was finished.
func isOfChain(pair *tls.Certificate, chainPEM []byte) bool {
	if pair == nil {
		return false
	}
	certs, err := pki.DecodeCertificates(chainPEM)
	return err == nil && certs[0].Equal(pair.Leaf)
}

// nodeOf returns the node's identity in a leaf certificate of this host.
func nodeOf(leaf *x509.Certificate) (pki.ID, error) {
	if leaf == nil || len(leaf.URIs) != 1 {
		return pki.ID{}, errors.New("certificate has not exactly one URI name")
	}
	id, err := pki.ParseID(leaf.URIs[0].String())
	if err != nil {
		return pki.ID{}, err
	}
	if id.Kind != pki.KindNode || !ids.Valid(id.Name) {
		return pki.ID{}, errors.New("certificate does not name a node")
	}
	return id, nil
}

// Usable reports whether a session may be opened with cert at now: it is not nil, and now is within its validity.
func Usable(cert *tls.Certificate, now time.Time) bool {
	return cert != nil && cert.Leaf != nil && now.Before(cert.Leaf.NotAfter) && !now.Before(cert.Leaf.NotBefore)
}
