package view

import (
	"sync"

	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
)

// mostDecoded is how many bytes of bodies one generation of decoded messages is kept for.
const mostDecoded = 2 << 20

// decoded keeps messages by the bodies that they were decoded from: most rows of a list have not changed since they
// were listed last, and decoding them costs more than the rest of a request. There are two generations: when the
// young one is full, it takes the place of the old one, and what is asked for again comes back.
type decoded[T any, M message[T]] struct {
	mu         sync.Mutex
	young, old map[string]M
	bytes      int // of the bodies in the young generation
}

// read returns the message of a body. It is shared between requests: nobody may change it. Without a receiver it
// decodes a message of the caller's own.
func (d *decoded[T, M]) read(body []byte) (M, error) {
	if d == nil {
		return decode[T, M](body)
	}
	if m, ok := d.find(body); ok {
		return m, nil
	}
	m, err := decode[T, M](body)
	if err == nil {
		d.mu.Lock()
		defer d.mu.Unlock()
		d.keep(string(body), m)
	}
	return m, err
}

func (d *decoded[T, M]) find(body []byte) (M, bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if m, ok := d.young[string(body)]; ok {
		return m, true
	}
	m, ok := d.old[string(body)]
	if ok {
		d.keep(string(body), m)
	}
	return m, ok
}

// keep expects the lock to be held.
func (d *decoded[T, M]) keep(body string, m M) {
	if d.bytes += len(body); d.bytes > mostDecoded || d.young == nil {
		d.young, d.old, d.bytes = map[string]M{}, d.young, len(body)
	}
	d.young[body] = m
}

// bodies are the decoded messages of the rows that lists of workspaces are made of. The zero value keeps none.
type bodies struct {
	workspaces   *decoded[lifecyclev1.Workspace, *lifecyclev1.Workspace]
	runs         *decoded[lifecyclev1.Run, *lifecyclev1.Run]
	observations *decoded[nodev1.Observation, *nodev1.Observation]
	identities   *decoded[recoveryv1.NodeIdentity, *recoveryv1.NodeIdentity]
	gates        *decoded[lifecyclev1.NodeGate, *lifecyclev1.NodeGate]
	sessions     *decoded[nodev1.SessionChanged, *nodev1.SessionChanged]
}

func keepBodies() *bodies {
	return &bodies{
		workspaces:   &decoded[lifecyclev1.Workspace, *lifecyclev1.Workspace]{},
		runs:         &decoded[lifecyclev1.Run, *lifecyclev1.Run]{},
		observations: &decoded[nodev1.Observation, *nodev1.Observation]{},
		identities:   &decoded[recoveryv1.NodeIdentity, *recoveryv1.NodeIdentity]{},
		gates:        &decoded[lifecyclev1.NodeGate, *lifecyclev1.NodeGate]{},
		sessions:     &decoded[nodev1.SessionChanged, *nodev1.SessionChanged]{},
	}
}
