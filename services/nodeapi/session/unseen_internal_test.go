package session

import (
	"log/slog"
	"testing"
	"time"

	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/services/nodeapi/authority"
	"github.com/gpuaas/mesh/services/nodeapi/roster"
)

type noEvents struct{}

func (noEvents) Session(*nodev1.SessionChanged, string) {}

// TestAnEndedSessionIsNotAwaited: a session that ends before the view has its node is forgotten, and one that another
// session of the node has replaced takes nothing from that one.
func TestAnEndedSessionIsNotAwaited(t *testing.T) {
	logger := slog.New(slog.DiscardHandler)
	s := &Server{deps: Deps{
		Roster: roster.New(logger, roster.Config{}, noEvents{}), Gone: func(*roster.Session) {},
		View: authority.New(logger, authority.Config{}, nil, nil),
	}}
	admitted := func(id string) *roster.Session {
		now := time.Now()
		sess := s.deps.Roster.Add(id, roster.Identity{NodeID: "a"}, nil, now, now)
		s.offerAdmitted(sess)
		return sess
	}
	first, second := admitted("first"), admitted("second")
	s.ended(first)
	if awaited, ok := s.unseen.Load("a"); !ok || awaited != second {
		t.Errorf("awaited: %v", awaited)
	}
	s.ended(second)
	if awaited, ok := s.unseen.Load("a"); ok {
		t.Errorf("awaited after its end: %v", awaited)
	}
	s.Decided(&recoveryv1.NodeAuthority{NodeId: "a"})
}
