package dispatch

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/gate"
)

// KindBacklog is the kind of the events that report that tasks of a node have expired in the queue, and that this is
// over. They carry gpuaas.recovery.v1.Evidence; the aggregate is task_backlog, its id the node's.
const KindBacklog = "task_backlog.changed"

// backlogForgotten is how long after the last expired task a node's backlog ends, whether the node is back or not.
const backlogForgotten = "1 day"

// backlogRow is a row of lifecycle.task_backlog.
type backlogRow struct {
	NodeID  string    `db:"node_id" expr:"@.node_id::text"`
	Expired int64     `db:"expired"`
	Since   time.Time `db:"since"`
	LastAt  time.Time `db:"last_at"`
	Version int64     `db:"version"`
}

var (
	noteBacklog = pg.Define(pg.RoleLifecycle, "dispatch.note_backlog", `
		WITH present AS MATERIALIZED (SELECT mesh.clock() AS at)
		INSERT INTO lifecycle.task_backlog AS b (node_id, expired, since, last_at, version)
		SELECT n.node_id, n.expired, p.at, p.at, (EXTRACT(EPOCH FROM p.at) * 1000000)::bigint
		FROM unnest($1::uuid[], $2::bigint[]) AS n (node_id, expired) CROSS JOIN present p ORDER BY n.node_id
		ON CONFLICT (node_id) DO UPDATE SET expired = b.expired + excluded.expired, last_at = excluded.last_at
		RETURNING `+pg.Columns[backlogRow]("b"))

	// $2 is the time between two sweeps: for as long a node has been connected, and none of its tasks expired.
	endBacklogs = pg.Define(pg.RoleLifecycle, "dispatch.end_backlogs", `
		WITH over AS (
			SELECT b.node_id FROM lifecycle.task_backlog b LEFT JOIN lifecycle.node_gate g ON g.node_id = b.node_id
			WHERE b.last_at <= mesh.clock() - $2::interval AND (
				g.node_id IS NULL OR g.retired OR b.last_at <= mesh.clock() - interval '`+backlogForgotten+`'
				OR `+gate.ConnectedSQL+` AND g.session_ready_at <= mesh.clock() - $2::interval)
			ORDER BY b.node_id LIMIT $1 FOR UPDATE OF b SKIP LOCKED
		)
		DELETE FROM lifecycle.task_backlog b USING over o WHERE b.node_id = o.node_id
		RETURNING `+pg.Columns[backlogRow]("b"))
)

// backlogBegan keeps which nodes the sweep has expired queued tasks of, and returns the events of those of which it had
// not before. That more expire is no event.
func backlogBegan(ctx context.Context, tx pgx.Tx, list []ended) ([]events.Event, error) {
	counts := map[string]int64{}
	for _, e := range list {
		if e.State == commonv1.TaskState_TASK_STATE_EXPIRED {
			counts[e.NodeID]++
		}
	}
	if len(counts) == 0 {
		return nil, nil
	}
	var nodes []string
	for id := range counts {
		nodes = append(nodes, id)
	}
	slices.Sort(nodes)
	expired := make([]int64, len(nodes))
	for i, id := range nodes {
		expired[i] = counts[id]
	}
	rows, err := pg.All[backlogRow](ctx, tx, noteBacklog, nodes, expired)
	if err != nil {
		return nil, fmt.Errorf("note expired tasks of nodes: %w", err)
	}
	var out []events.Event
	for _, r := range rows {
		if r.Since.Equal(r.LastAt) {
			out = append(out, r.event(commonv1.DriftReason_DRIFT_REASON_TASK_BACKLOG_STALE, r.Since, r.Version))
		}
	}
	return out, nil
}

// endBacklogsOnce ends the backlogs of nodes that are over, at most a batch of them, and returns how many.
func (s *Server) endBacklogsOnce(ctx context.Context, interval time.Duration) (int, error) {
	count := 0
	err := pg.InTx(ctx, s.deps.DB, func(ctx context.Context, tx pgx.Tx) error {
		rows, err := pg.All[backlogRow](ctx, tx, endBacklogs, sweepBatch, interval)
		if count = len(rows); err != nil || count == 0 {
			return err
		}
		evs := make([]events.Event, len(rows))
		for i, r := range rows {
			evs[i] = r.event(0, r.LastAt, r.Version+1)
		}
		_, err = events.Append(ctx, tx, evs...)
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("end backlogs of nodes: %w", err)
	}
	if count > 0 {
		s.deps.Committed()
	}
	return count, nil
}

// EndBacklogs ends the backlogs of the nodes that are connected again and have lost no more tasks for the given time,
// which is that between two sweeps. What expired is history by then.
func (s *Server) EndBacklogs(ctx context.Context, interval time.Duration) error {
	for {
		if n, err := s.endBacklogsOnce(ctx, interval); err != nil || n < sweepBatch {
			return err
		}
	}
}

func (r backlogRow) event(reason commonv1.DriftReason, at time.Time, version int64) events.Event {
	detail := strconv.FormatInt(r.Expired, 10) + " tasks expired in the queue"
	if r.Expired == 1 {
		detail = "a task expired in the queue"
	}
	return events.Event{
		Kind: KindBacklog, AggregateType: "task_backlog", AggregateID: r.NodeID, AggregateVersion: version,
		Payload: &recoveryv1.Evidence{
			NodeId: r.NodeID, Part: commonv1.DriftPart_DRIFT_PART_TASKS, Reason: reason,
			Source: commonv1.EvidenceSource_EVIDENCE_SOURCE_TASKS, ObservedAt: timestamppb.New(at), Detail: detail,
		},
		Correlation: events.Correlation{NodeID: r.NodeID},
	}
}
