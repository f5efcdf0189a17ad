package session

import (
	"sync"

	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/pki"
)

// RootList is the list of the roots of services that agents are sent. The zero value is empty, and nothing is sent. It
// is safe for concurrent use.
type RootList struct {
	mu     sync.Mutex
	frame  *nodev1.ConnectResponse
	change func(frame *nodev1.ConnectResponse)
}

// Replace sets the list to links, of which the last pki.MaxChain are sent. Every Welcome after Replace returns has
// them, and they are sent to the sessions that stand.
func (l *RootList) Replace(links []pki.RootLink) {
	if len(links) == 0 {
		return // no replica has registered a root yet
	}
	links = links[max(0, len(links)-pki.MaxChain):]
	list := &nodev1.ServiceRoots{}
	for _, link := range links {
		list.Roots = append(list.Roots, &nodev1.ServiceRoot{
			Certificate: link.DER, CrossCertificate: link.Cross, Retired: link.Retired,
		})
	}
	l.mu.Lock()
	l.frame = &nodev1.ConnectResponse{Frame: &nodev1.ConnectResponse_ServiceRoots{ServiceRoots: list}}
	frame, change := l.frame, l.change
	l.mu.Unlock()
	if change != nil {
		change(frame)
	}
}

// get returns the frame of the list; nil if there is none. Each change makes a new frame.
func (l *RootList) get() *nodev1.ConnectResponse {
	if l == nil {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.frame
}

// notify registers f, which is called after each change.
func (l *RootList) notify(f func(frame *nodev1.ConnectResponse)) {
	if l == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.change = f
}

// sendRoots sends a changed list to all admitted sessions. Agents of earlier builds ignore it.
func (s *Server) sendRoots(frame *nodev1.ConnectResponse) {
	for _, sess := range s.deps.Roster.CurrentAll() {
		sess.Send(frame)
	}
}
