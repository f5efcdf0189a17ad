package session

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/services/nodeapi/roster"
)

// protocolTaskKeys is the version of the protocol from which agents follow the keys of tasks.
const protocolTaskKeys = 4

// KeyList is the chain of the keys of tasks that agents are sent.
type KeyList struct{ sentList }

// Replace sets the chain to links, of which the last pki.MaxChain are sent. Every Welcome after Replace returns has
// them, and they are sent to the sessions that stand.
func (l *KeyList) Replace(links []pki.Link) {
	list := &nodev1.TaskKeys{}
	for _, link := range links[max(0, len(links)-pki.MaxChain):] {
		list.Keys = append(list.Keys, &nodev1.TaskKey{
			KeyId: link.KeyID, PublicKey: link.Public, EndorsedBy: link.EndorsedBy, Endorsement: link.Endorsement,
			Retired: link.Retired,
		})
	}
	l.set(&nodev1.ConnectResponse{Frame: &nodev1.ConnectResponse_TaskKeys{TaskKeys: list}})
}

// sendKeys sends a changed list to all admitted sessions.
func (s *Server) sendKeys(frame *nodev1.ConnectResponse) {
	for _, sess := range s.deps.Roster.CurrentAll() {
		if sess.Protocol() >= protocolTaskKeys {
			sess.Send(frame)
		}
	}
}

// agentKeys are the keys of tasks that the agent of a session has reported, and those of them that lifecycle has
// acknowledged. It is safe for concurrent use.
type agentKeys struct {
	mu        sync.Mutex
	reported  []string
	known     []string // to lifecycle
	raised    bool     // the gate is raised to the session
	reporting bool     // a report is under way
}

func (k *agentKeys) current() []string {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.reported
}

// record records the keys that the agent reports, and returns true if the caller must report them to lifecycle.
func (k *agentKeys) record(ids []string) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.reported = ids
	return k.beginLocked()
}

// gateRaised records that the gate was raised with ids, and returns true if the caller must report keys that have come
// since.
func (k *agentKeys) gateRaised(ids []string) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.raised, k.known = true, ids
	return k.beginLocked()
}

func (k *agentKeys) beginLocked() bool {
	if !k.raised || k.reporting || slices.Equal(k.reported, k.known) {
		return false
	}
	k.reporting = true
	return true
}

// took records that lifecycle has ids, and returns the keys to report next; nil ends the report.
func (k *agentKeys) took(ids []string) []string {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.known = ids
	if slices.Equal(k.reported, k.known) {
		k.reporting = false
		return nil
	}
	return k.reported
}

// reportKeys reports the keys of an agent until lifecycle has taken the last change or the session has ended. It does
// not block the reader.
func (s *Server) reportKeys(ctx context.Context, sess *roster.Session, keys *agentKeys) {
	s.deps.Roster.Go(func() {
		pause := 50 * time.Millisecond
		for ids := keys.current(); ids != nil && !sess.Gone() && ctx.Err() == nil; {
			taken, err := s.keys.Do(ctx, &lifecyclev1.SessionKeys{NodeId: sess.Identity.NodeID, SessionId: sess.ID, KeyIds: ids})
			if err == nil && taken {
				ids = keys.took(ids)
				s.deps.Work.Ready(sess) // tasks that waited for a key may be leased now
				continue
			}
			if err != nil {
				s.deps.Logger.DebugContext(ctx, "keys of an agent not reported", slog.String("node_id", sess.Identity.NodeID),
					slog.Any("error", err))
			}
			select {
			case <-time.After(pause):
				pause, ids = min(2*pause, 2*time.Second), keys.current()
			case <-ctx.Done():
			}
		}
	})
}

func (s *Server) keysBatch(ctx context.Context, reqs []*lifecyclev1.SessionKeys) ([]bool, error) {
	res, err := s.deps.Gate.KeysHeld(ctx, &lifecyclev1.KeysHeldRequest{Sessions: reqs})
	if err != nil {
		return nil, fmt.Errorf("report keys of agents: %w", err)
	}
	out := make([]bool, len(reqs))
	for i, req := range reqs {
		out[i] = slices.Contains(res.GetSessionIds(), req.GetSessionId())
	}
	return out, nil
}
