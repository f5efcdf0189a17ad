package session

import (
	"crypto"
	"crypto/tls"
	"errors"
	"sync"

	"github.com/gpuaas/mesh/agent/identity"
	"github.com/gpuaas/mesh/internal/pki"
)

// Memory is an Identity without a disk, for load generators and tests: what it holds is gone with the process. It is safe for concurrent use.
type Memory struct {
	mu         sync.Mutex
	node       identity.Node
	current    *tls.Certificate
	other      *tls.Certificate
	pending    crypto.Signer
	signed     []byte
	generation int64
	tasks      *pki.KeySet
}

// NewMemory holds a node with its certificate.
func NewMemory(node identity.Node, cert *tls.Certificate) *Memory {
	return &Memory{node: node, current: cert}
}

// WithTaskKeys makes m hold keys of tasks; without them it takes no part in them.
func (m *Memory) WithTaskKeys(set *pki.KeySet) *Memory {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.tasks = set
	return m
}

// TaskKeys returns the keys held; nil if it was given none.
func (m *Memory) TaskKeys() (*pki.KeySet, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.tasks, nil
}

// TakeTaskKeys follows a list from the keys held.
func (m *Memory) TakeTaskKeys(links []pki.Link) (*pki.KeySet, []string, error) {
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

// Node returns who it is.
func (m *Memory) Node() (identity.Node, bool) { return m.node, true }

// Certificate is the one in use.
func (m *Memory) Certificate() *tls.Certificate {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.current
}

// Other is the one in the other slot.
func (m *Memory) Other() *tls.Certificate {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.other
}

// JoinState returns what was stored last.
func (m *Memory) JoinState() ([]byte, int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.signed, m.generation
}

// StoreJoinState keeps a larger generation.
func (m *Memory) StoreJoinState(generation int64, signed []byte) (bool, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if generation <= m.generation {
		return false, nil
	}
	m.generation, m.signed = generation, signed
	return true, nil
}

// PendingKey makes a key once and answers it until a certificate for it is stored.
func (m *Memory) PendingKey() (crypto.Signer, error) {
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

// DropPendingKey forgets the key.
func (m *Memory) DropPendingKey() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.pending = nil
	return nil
}

// StoreIssued puts the certificate of the pending key into the other slot.
func (m *Memory) StoreIssued(chainPEM []byte, _ string) error {
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

// Flip swaps the slots.
func (m *Memory) Flip() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.other == nil {
		return errors.New("use the other certificate: none is held")
	}
	m.current, m.other = m.other, m.current
	return nil
}
