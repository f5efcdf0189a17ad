package view

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"google.golang.org/protobuf/types/known/timestamppb"

	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/services/readmodel/project"
)

// NodeFilter narrows a list of nodes. Zero fields do not.
type NodeFilter struct {
	ConnectedOnly  bool
	Disconnected   bool
	IncludeRetired bool
	Name, ID       string
	IDs            []string // nil: any
}

// nodeSession joins the node n with its gate, with the session that serves it (else its newest), and with that session's replica. $1 is the time, $2
// how fresh a beat is. During a hand-over two sessions stand: the newer one counts once it is admitted, so that nothing flaps.
const nodeSession = `
	LEFT JOIN readmodel.gate g ON g.node_id = n.node_id
	LEFT JOIN LATERAL (
		SELECT c.body, c.since, c.replica_id, COALESCE(c.serving AND NOT r.leaving AND r.beat_at > $1::timestamptz - $2::interval, false) AS connected
		FROM (SELECT x.session_id, x.version, x.generation, x.serving, x.since, x.replica_id, x.body FROM readmodel.session x
			WHERE x.node_id = n.node_id ORDER BY x.generation DESC, x.version DESC, x.session_id DESC LIMIT 5) c
		LEFT JOIN readmodel.replica r ON r.replica_id = c.replica_id
		ORDER BY connected DESC, c.generation DESC, c.version DESC, c.session_id DESC LIMIT 1) s ON true
	LEFT JOIN readmodel.replica b ON b.replica_id = s.replica_id`

// nodeFrom is a node with all that, and what its slots hold.
const nodeFrom = `readmodel.node n` + nodeSession + `
	LEFT JOIN LATERAL (
		SELECT count(*) AS slots, COALESCE(sum(jsonb_array_length(COALESCE(a.body->'gpu_device_ids', '[]'))), 0) AS gpus FROM readmodel.allocation a
		WHERE a.body->>'node_id' = n.node_id::text AND a.body->>'state' <> 'ALLOCATION_STATE_RELEASED') u ON true`

// Nodes answers one page by name.
func (s *Snapshot) Nodes(ctx context.Context, f NodeFilter, page Page) ([]*readmodelv1.Node, string, error) {
	listening, err := s.listeningSince(ctx)
	if err != nil {
		return nil, "", err
	}
	l := listing{
		name: "nodes", columns: nodeColumns + ", u.slots, u.gpus", from: nodeFrom,
		sort: "n.name", id: "n.node_id", args: []any{s.Now, BeatFresh},
	}
	l.and("(?::uuid IS NULL OR n.tenant_id = $3)", s.scope.arg())
	if f.ConnectedOnly {
		l.and("s.connected")
	}
	if f.Disconnected {
		l.and("NOT COALESCE(s.connected, false)")
	}
	if !f.IncludeRetired {
		l.and("n.state <> 'retired'")
	}
	if f.Name != "" {
		l.and("n.name = ?", f.Name)
	}
	if f.ID != "" {
		l.and("n.node_id = ?::uuid", optional(f.ID))
	}
	if f.IDs != nil {
		l.and("n.node_id = ANY(?::uuid[])", f.IDs)
	}
	items, next, err := run(ctx, s, l, page, func(row pgx.Row, lead ...any) (*readmodelv1.Node, error) {
		return s.scanNode(row, listening, lead...)
	})
	return namedPage(ctx, s, func(n *readmodelv1.Node) nameless {
		return nameless{workspaceID: n.GetWorkspaceId(), workspace: &n.Workspace}
	}, items, next, err)
}

func (s *Snapshot) scanNode(row pgx.Row, listening time.Time, lead ...any) (*readmodelv1.Node, error) {
	var n nodeScan
	var slots, gpus int32
	if err := row.Scan(append(append(lead, n.into()...), &slots, &gpus)...); err != nil {
		return nil, err //nolint:wrapcheck // wrapped by run
	}
	f, err := n.facts(listening, s.staleAfter)
	if err != nil {
		return nil, err
	}
	if f.Gate != nil {
		f.Gate.SlotsUsed, f.Gate.GpusUsed = slots, gpus
	}
	d := Describe(f, s.Now)
	return &readmodelv1.Node{
		NodeId: f.Identity.GetNodeId(), Name: f.Identity.GetName(), Connected: f.Connected, UserState: d.UserState, Reason: d.Reason,
		LastHeartbeatAt: stamp(d.LastHeartbeat), Identity: f.Identity, Session: f.Session, Gate: f.Gate, ReplicaId: f.Session.GetReplicaId(),
		NextAction: d.NextAction, Since: stamp(d.Since), WorkspaceId: cmp.Or(f.Gate.GetWorkspaceId(), f.Identity.GetWorkspaceId()),
	}, nil
}

// listeningSince is when the replicas that listen now began, zero if none does.
func (s *Snapshot) listeningSince(ctx context.Context) (time.Time, error) {
	var at *time.Time
	err := s.tx.QueryRow(ctx, `SELECT min(r.started_at) FROM readmodel.replica r
		WHERE NOT r.leaving AND r.beat_at > $1::timestamptz - $2::interval`, s.Now, BeatFresh).Scan(&at)
	if err != nil {
		return time.Time{}, fmt.Errorf("read replicas: %w", err)
	}
	if at == nil {
		return time.Time{}, nil
	}
	return *at, nil
}

// Replica is one replica of nodeapi as its beats tell.
type Replica struct {
	ID     string
	BeatAt time.Time
	Fresh  bool // beats, and is not leaving
	Beat   *nodev1.ReplicaBeat
}

// Replicas answers those that beat within the last ten minutes.
func (s *Snapshot) Replicas(ctx context.Context) ([]Replica, error) {
	rows, err := s.tx.Query(ctx, `SELECT r.replica_id::text, r.beat_at, NOT r.leaving AND r.beat_at > $1::timestamptz - $2::interval, r.body
		FROM readmodel.replica r WHERE r.beat_at > $1::timestamptz - interval '10 minutes' ORDER BY r.replica_id`, s.Now, BeatFresh)
	if err != nil {
		return nil, fmt.Errorf("read replicas: %w", err)
	}
	replicas, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (Replica, error) {
		var body []byte
		r := Replica{Beat: &nodev1.ReplicaBeat{}}
		if err := row.Scan(&r.ID, &r.BeatAt, &r.Fresh, &body); err != nil {
			return r, err //nolint:wrapcheck // wrapped below
		}
		return r, project.Decode(body, r.Beat)
	})
	if err != nil {
		return nil, fmt.Errorf("read replicas: %w", err)
	}
	return replicas, nil
}

func stamp(t time.Time) *timestamppb.Timestamp {
	if t.IsZero() {
		return nil
	}
	return timestamppb.New(t)
}
