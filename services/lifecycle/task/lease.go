package task

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/envelope"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/failpoint"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/gate"
)

// dispatchable holds for tasks t that may be offered now: all, but in rollback mode those alone that change nothing.
const dispatchable = `(t.type IN ('probe.noop', 'diagnostics.collect') OR NOT (SELECT mesh.rolled_back()))`

// offerAgainAfter is how long a task may stand offered and undelivered before the same session is offered it again.
const offerAgainAfter = "2 seconds"

// lease is one node's share of a lease.
type lease struct {
	session string
	epoch   int64
	max     int32
}

type picked struct {
	Row
	payload []byte // with open environment values: it is signed, and nothing else
	fresh   bool   // not offered before in this attempt
}

// LeaseTasks hands out queued tasks of nodes whose gate is open to the session that asks, signed.
func (s *Server) LeaseTasks(ctx context.Context, req *lifecyclev1.LeaseTasksRequest) (*lifecyclev1.LeaseTasksResponse, error) {
	leases := make(map[string]lease, len(req.GetNodes()))
	nodes := make([]string, 0, len(req.GetNodes()))
	for _, n := range req.GetNodes() {
		leases[n.GetNodeId()] = lease{session: n.GetSessionId(), epoch: n.GetGeneration(), max: n.GetMaxTasks()}
		nodes = append(nodes, n.GetNodeId())
	}
	var res *lifecyclev1.LeaseTasksResponse
	var tasks []picked
	wrote := false
	err := pg.InTx(ctx, s.deps.DB, func(ctx context.Context, tx pgx.Tx) error {
		res, tasks, wrote = &lifecyclev1.LeaseTasksResponse{}, nil, false // a second try begins with nothing
		gates, err := gate.LockForWork(ctx, tx, nodes)
		if err != nil {
			return fmt.Errorf("lock gates: %w", err)
		}
		var open, sessions []string
		var epochs []int64
		var limits []int32
		for _, n := range nodes {
			l := leases[n]
			if err := gates[n].MayLease(l.epoch); err != nil {
				res.Refused = append(res.Refused, &lifecyclev1.NodeRefusal{NodeId: n, Denial: fault.ToDenial(err, "")})
				continue
			}
			open, sessions, epochs, limits = append(open, n), append(sessions, l.session), append(epochs, l.epoch), append(limits, l.max)
		}
		if len(open) == 0 {
			return nil
		}
		tasks, err = pick(ctx, tx, open, sessions, epochs, limits)
		if err != nil {
			return err
		}
		var evs []events.Event
		for _, t := range tasks {
			if t.fresh {
				evs = append(evs, t.event())
			}
		}
		if len(evs) > 0 {
			if _, err := events.Append(ctx, tx, evs...); err != nil {
				return fmt.Errorf("report tasks: %w", err)
			}
		}
		wrote = len(tasks) > 0
		if tasks, err = s.openValues(ctx, tx, tasks); err != nil {
			return err
		}
		return failpoint.Hit("lifecycle.lease.before_commit")
	})
	if err != nil {
		return nil, err //nolint:wrapcheck // wrapped above
	}
	if err := failpoint.Hit("lifecycle.lease.after_commit"); err != nil {
		return nil, err
	}
	if wrote {
		s.deps.Committed()
	}
	return s.sign(res, tasks, leases)
}

// sign makes the offers. Signing stands outside the transaction: a lock is held no longer than it must.
func (s *Server) sign(res *lifecyclev1.LeaseTasksResponse, tasks []picked, leases map[string]lease) (*lifecyclev1.LeaseTasksResponse, error) {
	count := map[string]int32{}
	for _, t := range tasks {
		signed, err := envelope.Sign(s.deps.Key, envelope.Task{
			TaskID: t.TaskID, Type: t.Type, NodeID: t.NodeID, WorkspaceID: t.WorkspaceID, Epoch: t.Epoch, OpSeq: t.OpSeq,
			NotBefore: t.NotBefore, ExpiresAt: t.ExpiresAt, Attempt: t.Attempt, Payload: t.payload,
		})
		if err != nil {
			return nil, fmt.Errorf("sign task %s: %w", t.TaskID, err)
		}
		res.Tasks = append(res.Tasks, &lifecyclev1.LeasedTask{
			NodeId: t.NodeID, SessionId: leases[t.NodeID].session,
			Offer: &nodev1.TaskOffer{
				Envelope: signed.Bytes, Signature: signed.Signature, KeyId: signed.KeyID, CorrelationId: t.CorrelationID, WorkflowId: t.RunID,
			},
			Task: &nodev1.TaskRef{TaskId: t.TaskID, Attempt: t.Attempt},
		})
		count[t.NodeID]++
		if count[t.NodeID] == leases[t.NodeID].max {
			res.More = append(res.More, t.NodeID)
		}
	}
	return res, nil
}

// pick takes the oldest queued tasks of each node that are dispatchable, and those that were offered to this very session and not delivered in time. A task that is offered
// again keeps its attempt: the agent's ledger knows it, if it came through.
func pick(ctx context.Context, tx pgx.Tx, nodes, sessions []string, epochs []int64, limits []int32) ([]picked, error) {
	rows, err := tx.Query(ctx, `
		WITH asked AS (
			SELECT * FROM unnest($1::uuid[], $2::uuid[], $3::bigint[], $4::int[]) AS a (node_id, session_id, generation, most)
		), fresh AS (
			SELECT q.task_id, true AS fresh, a.session_id, a.generation FROM asked a CROSS JOIN LATERAL (
				SELECT t.task_id FROM lifecycle.task t
				WHERE t.node_id = a.node_id AND t.open AND t.state = 'queued' AND t.cancel_requested_at IS NULL AND t.not_before <= mesh.clock() AND t.expires_at > mesh.clock()
				  AND `+dispatchable+`
				ORDER BY t.task_id LIMIT a.most FOR UPDATE SKIP LOCKED
			) q
		), again AS (
			SELECT q.task_id, false AS fresh, a.session_id, a.generation FROM asked a CROSS JOIN LATERAL (
				SELECT t.task_id FROM lifecycle.task t
				WHERE t.node_id = a.node_id AND t.open AND t.state = 'dispatched' AND t.cancel_requested_at IS NULL AND t.session_epoch = a.generation
				  AND t.offered_at < mesh.clock() - interval '`+offerAgainAfter+`' AND t.expires_at > mesh.clock() AND `+dispatchable+`
				ORDER BY t.task_id LIMIT a.most FOR UPDATE SKIP LOCKED
			) q
		), chosen AS (
			SELECT * FROM fresh UNION ALL SELECT * FROM again
		), leased AS (
			UPDATE lifecycle.task t SET
				state = 'dispatched', attempt = t.attempt + CASE WHEN c.fresh THEN 1 ELSE 0 END,
				session_epoch = c.generation, session_id = c.session_id, offered_at = mesh.clock(),
				state_at = CASE WHEN c.fresh THEN mesh.clock() ELSE t.state_at END,
				version = t.version + CASE WHEN c.fresh THEN 1 ELSE 0 END
			FROM chosen c WHERE t.task_id = c.task_id AND t.state IN ('queued', 'dispatched')
			RETURNING t.*, c.fresh
		)
		SELECT t.payload, t.fresh, `+columns+` FROM leased t ORDER BY t.task_id`, nodes, sessions, epochs, limits)
	if err != nil {
		return nil, fmt.Errorf("lease tasks: %w", err)
	}
	defer rows.Close()
	var out []picked
	for rows.Next() {
		var p picked
		r, err := scan(prefixed{rows, []any{&p.payload, &p.fresh}})
		if err != nil {
			return nil, fmt.Errorf("read leased task: %w", err)
		}
		p.Row = r
		out = append(out, p)
	}
	if err := rows.Err(); err != nil {
		return nil, fmt.Errorf("lease tasks: %w", err)
	}
	return out, nil
}

// prefixed scans columns that stand before those of a Row.
type prefixed struct {
	row   pgx.Row
	first []any
}

// Scan reads the first columns and then the rest.
func (p prefixed) Scan(dest ...any) error {
	return p.row.Scan(append(append([]any{}, p.first...), dest...)...) //nolint:wrapcheck // a row's own error
}

// nodesWithWork lists nodes with a session that have something to lease, up to a bound. Nodes that are away are left out, so that the work that waits
// for them does not push others out of the list.
func nodesWithWork(ctx context.Context, q pg.Querier, limit int) ([]string, error) {
	rows, err := q.Query(ctx, `
		SELECT node_id::text FROM (
			SELECT DISTINCT t.node_id FROM lifecycle.task t, (SELECT mesh.clock() AS at OFFSET 0) now
			WHERE t.open AND t.expires_at > now.at AND (t.state = 'queued' AND t.not_before <= now.at OR
				t.state = 'dispatched' AND t.offered_at < now.at - interval '`+offerAgainAfter+`') AND `+dispatchable+`
		) n
		WHERE EXISTS (SELECT FROM lifecycle.node_gate g WHERE g.node_id = n.node_id AND g.admitted AND g.session_open) LIMIT $1`, limit)
	if err != nil {
		return nil, fmt.Errorf("list nodes with work: %w", err)
	}
	out, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return nil, fmt.Errorf("list nodes with work: %w", err)
	}
	return out, nil
}

// unansweredCancels lists tasks in flight that are to stop, of these runs or, if none is named, of all; in rollback mode none is.
func unansweredCancels(ctx context.Context, q pg.Querier, runs []string, limit int) ([]*lifecyclev1.TaskCancelHint, error) {
	sql, args := `SELECT node_id::text, task_id::text, attempt, epoch, cancel_reason FROM lifecycle.task
		WHERE cancel_requested_at IS NOT NULL AND open AND state <> 'queued' AND NOT (SELECT mesh.rolled_back())`, []any{limit}
	if len(runs) > 0 {
		sql, args = sql+` AND run_id = ANY ($2::uuid[])`, append(args, runs)
	}
	rows, err := q.Query(ctx, sql+` LIMIT $1`, args...)
	if err != nil {
		return nil, fmt.Errorf("list cancels: %w", err)
	}
	defer rows.Close()
	var out []*lifecyclev1.TaskCancelHint
	for rows.Next() {
		c := &lifecyclev1.TaskCancelHint{Task: &nodev1.TaskRef{}}
		if err := rows.Scan(&c.NodeId, &c.Task.TaskId, &c.Task.Attempt, &c.Epoch, &c.Reason); err != nil {
			return nil, fmt.Errorf("list cancels: %w", err)
		}
		out = append(out, c)
	}
	if err := rows.Err(); err != nil {
		return nil, fmt.Errorf("list cancels: %w", err)
	}
	return out, nil
}
