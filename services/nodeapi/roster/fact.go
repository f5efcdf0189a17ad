package roster

import (
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/wallclock"
)

// Fact returns the session as an event reports it, with its times by the database's clock (R11). Each call is a new
// version. If the session has gone on to a later state than the caller knows, the fact has that state: a later version
// never takes a session back.
func (s *Session) Fact(state commonv1.SessionState, withHost bool) *nodev1.SessionChanged {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.version++
	state = max(state, s.State())
	now := wallclock.Now()
	dbNow := now.Add(s.roster.cfg.Offset())
	f := &nodev1.SessionChanged{
		SessionId: s.ID, NodeId: s.Identity.NodeID, NodeInstanceId: s.instanceID, ReplicaId: s.roster.replicaID,
		Generation: s.generation, State: state, Late: s.late,
		OpenedAt: timestamppb.New(s.openedDB), LastSeenAt: timestamppb.New(dbNow.Add(-now.Sub(s.LastSeen()))),
		Serial: s.Identity.Serial, RemoteAddress: s.Identity.Remote,
		AgentVersion: s.agent.version, LedgerId: s.agent.ledgerID, BootId: s.agent.bootID, Version: s.version,
	}
	f.Diagnostics, f.Recovery = s.diags, s.agent.recovery // each fact replaces what a view has of the session
	if hello := s.hello; hello != nil {
		if len(s.diags) == 0 {
			f.Diagnostics = newest(hello.Diags, keptDiagnostics)
		}
		if withHost {
			f.Host, f.Diagnostics, f.Profile, f.TaskTypes = hello.Host, hello.Diags, hello.Profile, hello.TaskTypes
		}
	}
	if s.profile.facts != nil {
		f.Profile = s.profile.facts
	}
	if s.clockOffset != 0 {
		f.ClockOffset = durationpb.New(s.clockOffset)
	}
	if state == commonv1.SessionState_SESSION_STATE_CLOSED {
		f.ClosedAt = timestamppb.New(dbNow)
		f.CloseReason, f.CloseDetail = s.closeWhy, s.closeText
	}
	return f
}

// SetClock records how far the host's clock is ahead of the database's, for later events. Zero: it is not.
func (s *Session) SetClock(offset time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.clockOffset = offset
}

// ClockChanged returns the session as an event reports it, after SetClock.
func (s *Session) ClockChanged(offset time.Duration) *nodev1.SessionChanged {
	s.SetClock(offset)
	return s.Fact(s.State(), false)
}

// HostChanged returns the session as an event reports it, with the changed facts of its host.
func (s *Session) HostChanged(host *commonv1.HostFacts) *nodev1.SessionChanged {
	f := s.Fact(s.State(), false)
	f.Host = host
	return f
}
