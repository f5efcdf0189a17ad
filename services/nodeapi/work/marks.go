package work

import (
	"sync"

	"github.com/gpuaas/mesh/services/nodeapi/roster"
)

// Marks holds the nodes of this replica's sessions that may have work, and wakes the dispatcher. It is made before the
// parts that mark nodes. Safe for concurrent use.
type Marks struct {
	roster *roster.Roster
	wake   chan struct{}

	mu    sync.Mutex
	nodes map[string]struct{}
}

// NewMarks returns marks of no node.
func NewMarks(r *roster.Roster) *Marks {
	return &Marks{roster: r, wake: make(chan struct{}, 1), nodes: map[string]struct{}{}}
}

// Mark records that nodes may have work, so that the next lease asks for it. Nodes without a session here are left out.
func (m *Marks) Mark(nodes ...string) {
	marked := false
	m.mu.Lock()
	for _, n := range nodes {
		if m.roster.Current(n) != nil {
			m.nodes[n] = struct{}{}
			marked = true
		}
	}
	m.mu.Unlock()
	if marked {
		poke(m.wake)
	}
}

// take removes marked nodes one by one, and passes each to more until that returns false or none is left.
func (m *Marks) take(more func(node string) bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for n := range m.nodes {
		delete(m.nodes, n)
		if !more(n) {
			return
		}
	}
}
