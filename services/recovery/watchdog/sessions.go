package watchdog

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
)

const kindSession = "session.changed"

// Together writes events to the watchdog's tables, to the same effect as Apply one by one: those of sessions, of which
// a fleet that returns has thousands, with a few statements for all. No other event writes their table, and its
// triggers keep what depends on it.
func Together(ctx context.Context, tx pgx.Tx, records []events.Record) error {
	var sessions []events.Record
	for _, r := range records {
		if r.Kind == kindSession {
			sessions = append(sessions, r)
			continue
		}
		if err := Apply(ctx, tx, r); err != nil {
			return err
		}
	}
	return sessionsChanged(ctx, tx, sessions)
}

// sessionRows are rows of watch_session, by column, of different nodes.
type sessionRows struct {
	sessions, nodes, replicas, reasons []string
	versions, generations              []int64
	serving                            []bool
	since                              []time.Time
	ended                              []string // nodes of those that do not serve
}

// sessionsChanged writes events of sessions. The n-th events of all nodes are written together, before their next ones:
// what is kept of a node depends on the order of its events alone.
func sessionsChanged(ctx context.Context, tx pgx.Tx, records []events.Record) error {
	var layers []*sessionRows
	seen := map[string]int{} // events of a node so far
	for _, r := range records {
		s := &nodev1.SessionChanged{}
		if err := r.Decode(s); err != nil {
			return err
		}
		n := seen[s.GetNodeId()]
		seen[s.GetNodeId()]++
		if n == len(layers) {
			layers = append(layers, &sessionRows{})
		}
		layers[n].add(s, r)
	}
	for _, l := range layers {
		if err := l.write(ctx, tx); err != nil {
			return err
		}
	}
	return nil
}

func (l *sessionRows) add(s *nodev1.SessionChanged, r events.Record) {
	serving := !s.GetLate() && (s.GetState() == commonv1.SessionState_SESSION_STATE_ADMITTED ||
		s.GetState() == commonv1.SessionState_SESSION_STATE_DRAINING)
	l.sessions, l.nodes = append(l.sessions, s.GetSessionId()), append(l.nodes, s.GetNodeId())
	l.replicas, l.reasons = append(l.replicas, s.GetReplicaId()), append(l.reasons, names.OfSet(s.GetCloseReason()))
	l.versions, l.generations = append(l.versions, r.AggregateVersion), append(l.generations, s.GetGeneration())
	l.serving, l.since = append(l.serving, serving), append(l.since, r.CreatedAt)
	if !serving {
		l.ended = append(l.ended, s.GetNodeId())
	}
}

func (l *sessionRows) write(ctx context.Context, tx pgx.Tx) error {
	err := pg.Queue(ctx, tx, noteSessions, l.sessions, l.versions, l.nodes, l.replicas, l.generations, l.serving, l.since,
		l.reasons)
	if err != nil {
		return fmt.Errorf("note sessions: %w", err)
	}
	if len(l.ended) == 0 {
		return nil
	}
	slices.Sort(l.ended)
	if err := pg.Queue(ctx, tx, forgetSessions, l.ended); err != nil {
		return fmt.Errorf("forget sessions: %w", err)
	}
	return nil
}
