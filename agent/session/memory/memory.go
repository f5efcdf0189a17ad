package memory

import (
	"crypto"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"sync"

	"github.com/gpuaas/mesh/agent/identity"
	"github.com/gpuaas/mesh/internal/pki"
)

// Identity is a session.Identity without a disk: its content is gone with the process. It is safe for concurrent use.
type Identity struct {
	mu         sync.Mutex
	node       identity.Node
	current    *tls.Certificate
	other      *tls.Certificate
	pending    crypto.Signer
	signed     []byte
	generation int64
	tasks      *pki.KeySet
}

// New returns the identity of a node with its certificate.
func New(node identity.Node, cert *tls.Certificate) *Identity {
	return &Identity{node: node, current: cert}
}

// WithTaskKeys gives m task keys and returns m; without them TaskKeys returns nil and lists of keys are ignored.
func (m *Identity) WithTaskKeys(set *pki.KeySet) *Identity {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.tasks = set
	return m
}

// TaskKeys returns the present task keys; nil if m was given none.
func (m *Identity) TaskKeys() (*pki.KeySet, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.tasks, nil
}

// TakeTaskKeys replaces the task keys by those that follow from them by a list; see pki.Advance.
func (m *Identity) TakeTaskKeys(links []pki.Link) (*pki.KeySet, []string, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.tasks == nil {
		return nil, nil, nil
	}
	next, unbelieved, err := pki.Advance(pki.TaskKind, m.tasks, links)
	if err != nil {
		return m.tasks, unbelieved, err
	}
	m.tasks = next
	return next, unbelieved, nil
}

// Node returns the node that m was made with, and true.
func (m *Identity) Node() (identity.Node, bool) { return m.node, true }

// Certificate returns the certificate in use.
func (m *Identity) Certificate() *tls.Certificate {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.current
}

// Other returns the certificate in the other slot; nil if there is none.
func (m *Identity) Other() *tls.Certificate {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.other
}

// JoinState returns the join state that was stored last, with its generation.
func (m *Identity) JoinState() ([]byte, int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.signed, m.generation
}

// StoreJoinState stores a join state of a larger generation, and returns whether it did.
func (m *Identity) StoreJoinState(generation int64, signed []byte) (bool, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if generation <= m.generation {
		return false, nil
	}
	m.generation, m.signed = generation, signed
	return true, nil
}

// RenewalKey makes a key once and returns it until a certificate for it is stored or it is dropped.
func (m *Identity) RenewalKey() (crypto.Signer, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.pending == nil {
		key, err := pki.NewKey()
		if err != nil {
			return nil, err
		}
		m.pending = key
	}
	return m.pending, nil
}

// DropRenewalKey forgets the key.
func (m *Identity) DropRenewalKey() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.pending = nil
	return nil
}

// StoreIssued puts the certificate of the renewal's key into the other slot.
func (m *Identity) StoreIssued(chainPEM []byte, _ string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.pending == nil {
		return identity.ErrNotOurs
	}
	encoded, err := pki.EncodeKey(m.pending)
	if err != nil {
		return err
	}
	pair, err := tls.X509KeyPair(chainPEM, encoded)
	if err != nil {
		return errors.Join(identity.ErrNotOurs, err)
	}
	m.other, m.pending = &pair, nil
	return nil
}

// RecoveryKey returns nil: m asks for no recovery tokens.
func (m *Identity) RecoveryKey() (crypto.Signer, error) { return nil, nil }

// Confirm does nothing, since m has no recovery tokens.
func (m *Identity) Confirm(*x509.Certificate) error { return nil }

// Flip swaps the slots.
func (m *Identity) Flip() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.other == nil {
		return errors.New("use the other certificate: none is held")
	}
	m.current, m.other = m.other, m.current
	return nil
}
