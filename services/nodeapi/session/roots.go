package session

import (
	"sync"

	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/pki"
)

// sentList is the newest frame of a list that agents are sent. The zero value is empty, and nothing is sent. It is safe
// for concurrent use.
type sentList struct {
	mu     sync.Mutex
	frame  *nodev1.ConnectResponse
	change func(frame *nodev1.ConnectResponse)
}

func (l *sentList) set(frame *nodev1.ConnectResponse) {
	l.mu.Lock()
	l.frame = frame
	change := l.change
	l.mu.Unlock()
	if change != nil {
		change(frame)
	}
}

// get returns the frame of the list; nil if there is none. Each change makes a new frame.
func (l *sentList) get() *nodev1.ConnectResponse {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.frame
}

// notify registers f, which is called after each change.
func (l *sentList) notify(f func(frame *nodev1.ConnectResponse)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.change = f
}

// RootList is the list of the roots of services that agents are sent.
type RootList struct{ sentList }

// Replace sets the list to links, of which the last pki.MaxChain are sent. Every Welcome after Replace returns has
// them, and they are sent to the sessions that stand.
func (l *RootList) Replace(links []pki.RootLink) {
	if len(links) == 0 {
		return // no replica has registered a root yet
	}
	list := &nodev1.ServiceRoots{}
	for _, link := range links[max(0, len(links)-pki.MaxChain):] {
		list.Roots = append(list.Roots, &nodev1.ServiceRoot{
			Certificate: link.DER, CrossCertificate: link.Cross, Retired: link.Retired,
		})
	}
	l.set(&nodev1.ConnectResponse{Frame: &nodev1.ConnectResponse_ServiceRoots{ServiceRoots: list}})
}

// sendRoots sends a changed list to all admitted sessions. Agents of earlier builds ignore it.
func (s *Server) sendRoots(frame *nodev1.ConnectResponse) {
	for _, sess := range s.deps.Roster.CurrentAll() {
		sess.Send(frame)
	}
}
