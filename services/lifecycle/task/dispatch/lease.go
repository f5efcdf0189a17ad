package dispatch

import (
	"context"
	"fmt"
	"log/slog"

	"github.com/jackc/pgx/v5"

	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/aside"
	"github.com/gpuaas/mesh/internal/envelope"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/failpoint"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/gate"
	"github.com/gpuaas/mesh/services/lifecycle/task"
)

// dispatchable is the condition that a task of the table t may be offered now: every task, but in rollback mode only
// the types that change nothing on the node.
func dispatchable(t string) string {
	return `(` + t + `.type IN ('probe.noop', 'diagnostics.collect') OR NOT (SELECT mesh.rolled_back()))`
}

// offerBytes bounds the payloads of one message with offers: a replica reads four MiB. Tasks beyond it stay leased, and
// are offered with a later message.
const offerBytes = 2 << 20

// fitting returns how many of the tasks go into one message: one at least.
func fitting(tasks []picked) int {
	size := 0
	for i, t := range tasks {
		if size += len(t.payload); i > 0 && size > offerBytes {
			return i
		}
	}
	return len(tasks)
}

// lease is one node's share of a lease.
type lease struct {
	session string
	epoch   int64
	max     int32
}

type picked struct {
	task.Row
	session string // that it is leased to
	keyID   string // that signs the attempt
	payload []byte // with its environment values opened; it goes into the signed envelope and nowhere else
	report  bool   // an event is due
}

// LeaseTasks leases queued tasks to the sessions of the request whose nodes' gates are open to them, and returns signed
// offers.
func (s *Server) LeaseTasks(ctx context.Context, req *lifecyclev1.LeaseTasksRequest) (*lifecyclev1.LeaseTasksResponse,
	error,
) {
	leases := make(map[string]lease, len(req.GetNodes()))
	var asked ask
	for _, n := range req.GetNodes() {
		leases[n.GetNodeId()] = lease{session: n.GetSessionId(), epoch: n.GetGeneration(), max: n.GetMaxTasks()}
		asked.nodes, asked.sessions = append(asked.nodes, n.GetNodeId()), append(asked.sessions, n.GetSessionId())
		asked.generations, asked.limits = append(asked.generations, n.GetGeneration()), append(asked.limits, n.GetMaxTasks())
	}
	signer, err := s.deps.Keys.Signer()
	if err != nil {
		return nil, err
	}
	asked.keyID = signer.ID()
	var res *lifecyclev1.LeaseTasksResponse
	var tasks []picked
	wrote := false
	err = pg.InTx(ctx, s.deps.DB, func(ctx context.Context, tx pgx.Tx) error {
		res, tasks, wrote = &lifecyclev1.LeaseTasksResponse{}, nil, false // a second try begins with nothing
		var gates gate.Views
		var err error
		gates, tasks, err = pick(ctx, tx, asked)
		if err != nil {
			return err
		}
		for _, n := range asked.nodes {
			if err := gates[n].MayLease(leases[n].epoch, asked.keyID); err != nil {
				res.Refused = append(res.Refused, &lifecyclev1.NodeRefusal{NodeId: n, Denial: fault.ToDenial(err, "")})
			}
		}
		var evs []events.Event
		for _, t := range tasks {
			if t.report {
				evs = append(evs, t.Event())
			}
		}
		if len(evs) > 0 {
			if _, err := events.Append(ctx, tx, evs...); err != nil {
				return fmt.Errorf("report tasks: %w", err)
			}
		}
		picked := len(tasks)
		if tasks, err = s.openValues(ctx, tx, tasks); err != nil {
			return err
		}
		wrote = len(evs) > 0 || len(tasks) < picked // one that cannot be opened ends with an event
		return failpoint.Hit("lifecycle.lease.before_commit")
	})
	if err != nil {
		return nil, err
	}
	if err := failpoint.Hit("lifecycle.lease.after_commit"); err != nil {
		return nil, err
	}
	if wrote {
		s.deps.Committed()
	}
	tasks = tasks[:fitting(tasks)]
	for i := range tasks {
		tasks[i].session = leases[tasks[i].NodeID].session
	}
	return s.sign(ctx, res, tasks, leases)
}

// sign appends the signed offers to res, and the nodes that got as many as their lease asked for to res.More. It runs
// outside the transaction, so that signing does not prolong the locks.
func (s *Server) sign(ctx context.Context, res *lifecyclev1.LeaseTasksResponse, tasks []picked,
	leases map[string]lease,
) (*lifecyclev1.LeaseTasksResponse, error) {
	count := map[string]int32{}
	for _, t := range tasks {
		// An attempt that is offered again is signed by the key that signed it first: the node has that key, and it is not
		// retired before the task ends. If this replica does not have the key's file, another one that does offers the task.
		signer, err := s.deps.Keys.SignerOf(t.keyID)
		if err != nil {
			s.deps.Logger.WarnContext(ctx, "task not offered again", slog.String("task_id", t.TaskID), obs.Err(err))
			continue
		}
		signed, err := envelope.Sign(signer, envelope.Task{
			TaskID: t.TaskID, Type: t.Type, NodeID: t.NodeID, WorkspaceID: t.WorkspaceID, Epoch: t.Epoch, OpSeq: t.OpSeq,
			NotBefore: t.NotBefore, ExpiresAt: t.ExpiresAt, Attempt: t.Attempt, Payload: t.payload,
		})
		if err != nil {
			return nil, fmt.Errorf("sign task %s: %w", t.TaskID, err)
		}
		res.Tasks = append(res.Tasks, &lifecyclev1.LeasedTask{
			NodeId: t.NodeID, SessionId: t.session,
			Offer: &nodev1.TaskOffer{
				Envelope: signed.Bytes, Signature: signed.Signature, KeyId: signed.KeyID, CorrelationId: t.CorrelationID,
				WorkflowId: t.RunID,
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

// ask is the request of several sessions: each slice has one element for each session, in the same order.
type ask struct {
	nodes, sessions []string
	generations     []int64
	limits          []int32
	keyID           string // of the key that signs at present
}

// pick locks the gates of the nodes that ask and, where they are open to the session, takes the oldest queued tasks of
// each that are dispatchable, and those that were offered to this same session and not delivered in time. A task that
// is offered again keeps its attempt: the agent's ledger has it if the offer came through. Both statements go in one
// round trip; see gate.QueueLockForWork for why the second one reads the gates as they were locked.
func pick(ctx context.Context, tx pgx.Tx, asked ask) (gate.Views, []picked, error) {
	var batch pg.Batch
	gates := gate.QueueLockForWork(&batch, asked.nodes)
	var rows []leasedRow
	batch.Queue(leaseTasks, asked.nodes, asked.sessions, asked.generations, asked.limits,
		asked.keyID).Query(func(found pgx.Rows) error {
		var err error
		rows, err = pgx.CollectRows(found, pgx.RowToStructByName[leasedRow])
		return err
	})
	if err := batch.Send(ctx, tx); err != nil {
		return nil, nil, fmt.Errorf("lease tasks: %w", err)
	}
	out, err := aside.Rows(ctx, "task", rows, func(r leasedRow) string { return r.TaskID },
		func(r leasedRow) (picked, error) {
			row, err := r.Parse(ctx)
			return picked{Row: row, keyID: r.KeyID, payload: r.Payload, report: r.Report}, err
		})
	return gates, out, err
}

// firstNode sorts before the ids of all nodes.
const firstNode = "00000000-0000-0000-0000-000000000000"

// nodesWithWork lists nodes with a session that have tasks to be leased. It reads nodes with open tasks a page at a
// time, from the first one behind after, and calls found for each page that has nodes to list. It reports whether more
// may become due without an event: tasks that are offered and not delivered, or that may not start yet. Nodes without a
// session are left out. With an error it returns the node behind which the list is to go on, firstNode otherwise.
func nodesWithWork(ctx context.Context, q pg.Querier, page int, after string, found func(due []string) error) (bool,
	string, error,
) {
	more := false
	for {
		rows, err := pg.All[waitingNode](ctx, q, nodesWithTasks, page, after)
		if err != nil {
			return false, after, fmt.Errorf("list nodes with work: %w", err)
		}
		var due []string
		for _, r := range rows {
			if r.Work > 1 {
				due = append(due, r.NodeID)
			}
			more = more || r.Work > 0
		}
		if len(due) > 0 {
			if err := found(due); err != nil {
				return false, after, err
			}
		}
		if len(rows) < page {
			return more, firstNode, nil
		}
		after = rows[len(rows)-1].NodeID
	}
}

// unansweredCancels lists at most limit tasks in flight that are to stop, at nodes with a session; in rollback mode
// none.
func unansweredCancels(ctx context.Context, q pg.Querier, limit int) ([]*lifecyclev1.TaskCancelHint, error) {
	rows, err := pg.All[cancelRow](ctx, q, listCancels, limit)
	if err != nil {
		return nil, fmt.Errorf("list cancels: %w", err)
	}
	out := make([]*lifecyclev1.TaskCancelHint, len(rows))
	for i, r := range rows {
		out[i] = &lifecyclev1.TaskCancelHint{
			NodeId: r.NodeID, Task: &nodev1.TaskRef{TaskId: r.TaskID, Attempt: r.Attempt}, Epoch: r.Epoch, Reason: r.Reason,
		}
	}
	return out, nil
}
