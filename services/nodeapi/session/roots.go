package session

import (
	"sync"

	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/pki"
)

// RootList is the list of the roots of services that agents are sent. The zero value has none, and agents are sent
// none. Safe for concurrent use.
type RootList struct {
	mu     sync.Mutex
	frame  *nodev1.ConnectResponse
	change func(frame *nodev1.ConnectResponse)
}

// Replace makes links the list, of which the last pki.MaxChain are sent. From its return each Welcome has them, and
// sessions that stand are told.
func (l *RootList) Replace(links []pki.RootLink) {
	if len(links) == 0 {
		return // before the first replica has registered one, there is nothing to follow
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

// get returns the frame of the list, which is another one after each change; nil: there is none.
func (l *RootList) get() *nodev1.ConnectResponse {
	if l == nil {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.frame
}

// notify makes f be called after each change.
func (l *RootList) notify(f func(frame *nodev1.ConnectResponse)) {
	if l == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.change = f
}

// sendRoots sends all admitted sessions a changed list. Agents of earlier builds ignore it.
func (s *Server) sendRoots(frame *nodev1.ConnectResponse) {
	for _, sess := range s.deps.Roster.CurrentAll() {
		sess.Send(frame)
	}
}
