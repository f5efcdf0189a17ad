package ask

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1/lifecyclev1connect"
	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/recovery/drift/collect"
)

const (
	// mostUnderWay is how many tasks there may be at once over all replicas; one request names that many.
	mostUnderWay = 16
	// lease is for how long no other request names a node. After it a request whose answer was lost is repeated, with
	// the same key.
	lease = 5 * time.Second
	// answerWithin is how long a task that was asked for may go without an end.
	answerWithin = 5 * time.Minute
	// openAgain is how often lifecycle is asked for a task that has not ended; refusedAgain is when it is asked again
	// after it has refused one.
	openAgain    = 500 * time.Millisecond
	refusedAgain = 30 * time.Second
	// rest is the time between two rounds while no request is under way.
	rest = 30 * time.Second
	// timeout bounds one request.
	timeout = 4 * time.Second
	// lock is the key of the advisory lock under which requests are taken.
	lock = 0x617365726b
)

var (
	takeLock = pg.Define(pg.RoleRecovery, "ask.take_lock", `SELECT pg_advisory_xact_lock($1)`)

	// pending reports whether there is any request, which is read without a lock.
	pending = pg.Define(pg.RoleRecovery, "ask.pending", `SELECT EXISTS (SELECT FROM recovery.record_request)`)

	giveUp = pg.Define(pg.RoleRecovery, "ask.give_up", `
		DELETE FROM recovery.record_request r WHERE r.until <= mesh.clock()`)

	// take takes what is under way and due, and as many of those that wait as there are places, of nodes that are
	// connected.
	take = pg.Define(pg.RoleRecovery, "ask.take", `
		WITH waiting AS (
			SELECT r.node_id FROM recovery.record_request r JOIN recovery.judgement j USING (node_id)
			WHERE r.asked_at IS NULL AND r.due_at <= mesh.clock() AND j.identity_state = $4 AND j.replica_id IS NOT NULL
			ORDER BY r.due_at, r.node_id LIMIT GREATEST(0, $1 -
				(SELECT count(*) FROM recovery.record_request r WHERE r.asked_at IS NOT NULL))
		)
		UPDATE recovery.record_request r SET due_at = mesh.clock() + $2::interval,
			until = CASE WHEN r.asked_at IS NULL THEN mesh.clock() + $3::interval ELSE r.until END,
			asked_at = COALESCE(r.asked_at, mesh.clock())
		WHERE r.node_id IN (SELECT w.node_id FROM waiting w) OR r.asked_at IS NOT NULL AND r.due_at <= mesh.clock()
		RETURNING r.node_id::text AS node_id, r.began, r.correlation_id`)

	// again has lifecycle asked again at a later time. A task that was refused has no place meanwhile.
	again = pg.Define(pg.RoleRecovery, "ask.again", `
		UPDATE recovery.record_request r SET due_at = mesh.clock() + $3::interval,
			asked_at = CASE WHEN $4 THEN NULL ELSE r.asked_at END
		WHERE r.node_id = $1 AND r.began = $2`)

	end = pg.Define(pg.RoleRecovery, "ask.end", `
		DELETE FROM recovery.record_request r WHERE r.node_id = $1 AND r.began = $2`)
)

// requestRow is a request that was taken.
type requestRow struct {
	NodeID        string `db:"node_id"`
	Began         int64  `db:"began"`
	CorrelationID string `db:"correlation_id"`
}

// key is the same for one verdict, whichever replica asks and however often.
func (r requestRow) key() string { return fmt.Sprintf("verdict/%d", r.Began) }

// Deps are the dependencies of an Asker.
type Deps struct {
	Logger  *slog.Logger
	Pool    *pgxpool.Pool
	Records lifecyclev1connect.DiagnosticsServiceClient // lifecycle's
}

// Asker asks for records at one replica.
type Asker struct {
	deps Deps
	news events.Signal // there are requests
	next time.Duration // until the next round; of Run alone
}

// New checks the dependencies; it does not touch the database.
func New(deps Deps) (*Asker, error) {
	if deps.Logger == nil || deps.Pool == nil || deps.Records == nil {
		return nil, errors.New("asking for records needs a logger, a pool and lifecycle")
	}
	return &Asker{deps: deps}, nil
}

// Nudge has the asker look for requests. It is called after the commit of Want.
func (a *Asker) Nudge() { a.news.Notify() }

// Run asks for records until ctx ends.
func (a *Asker) Run(ctx context.Context) error {
	return app.EveryPaced(ctx, a.deps.Logger, "drift-records", func() func(context.Context) bool {
		news := a.news.C()
		return func(ctx context.Context) bool {
			timer := time.NewTimer(a.next)
			defer timer.Stop()
			select {
			case <-ctx.Done():
				return false
			case <-news:
			case <-timer.C:
			}
			return true
		}
	}, func(ctx context.Context) error {
		a.next = lease // also if the round fails
		asked, err := a.Once(ctx)
		switch {
		case err != nil:
			return err
		case asked == 0:
			a.next = rest
		default:
			a.next = openAgain
		}
		return nil
	})
}

// Once asks lifecycle for the records of nodes that are due, and keeps what became of them. It returns for how many
// nodes it asked.
func (a *Asker) Once(ctx context.Context) (int, error) {
	list, err := a.take(ctx)
	if err != nil || len(list) == 0 {
		return 0, err
	}
	req := &lifecyclev1.CollectRecordsRequest{}
	byID := make(map[string]requestRow, len(list))
	for _, r := range list {
		byID[r.NodeID] = r
		req.Nodes = append(req.Nodes, &lifecyclev1.RecordRequest{
			NodeId: r.NodeID, IdempotencyKey: r.key(), CorrelationId: r.CorrelationID,
		})
	}
	call, cancel := context.WithTimeout(obs.With(ctx, obs.Correlation{CorrelationID: list[0].CorrelationID}), timeout)
	answer, err := a.deps.Records.CollectRecords(call, req)
	cancel()
	if err != nil {
		return 0, fmt.Errorf("ask lifecycle for records of hosts: %w", err)
	}
	return len(list), a.keep(ctx, byID, answer)
}

func (a *Asker) take(ctx context.Context) ([]requestRow, error) {
	some, err := pg.Value[bool](ctx, a.deps.Pool, pending)
	if err != nil || !some {
		return nil, err
	}
	var list []requestRow
	err = pg.InTx(ctx, a.deps.Pool, func(ctx context.Context, tx pgx.Tx) error {
		if _, err := pg.Exec(ctx, tx, takeLock, int64(lock)); err != nil {
			return err
		}
		if _, err := pg.Exec(ctx, tx, giveUp); err != nil {
			return err
		}
		list, err = pg.All[requestRow](ctx, tx, take, mostUnderWay, lease, answerWithin, collect.ActiveState)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("take requests for records of hosts: %w", err)
	}
	return list, nil
}

// keep keeps lifecycle's answers. The rows of nodes are locked before those of requests, as the judge does.
func (a *Asker) keep(ctx context.Context, asked map[string]requestRow, answer *lifecyclev1.CollectRecordsResponse,
) error {
	list := slices.SortedFunc(slices.Values(answer.GetNodes()), func(one, other *lifecyclev1.CollectedRecord) int {
		return cmp.Compare(one.GetNodeId(), other.GetNodeId())
	})
	err := pg.InTx(ctx, a.deps.Pool, func(ctx context.Context, tx pgx.Tx) error {
		for _, c := range list {
			r, known := asked[c.GetNodeId()]
			if !known || len(c.GetDiagnostics()) == 0 {
				continue
			}
			_, _, err := collect.MergeHost(ctx, tx, r.NodeID, collect.RecordsOf(c.GetDiagnostics()), r.CorrelationID)
			if err != nil && fault.ReasonOf(err) != commonv1.Reason_REASON_NOT_FOUND {
				return err
			}
		}
		for _, c := range list {
			if err := after(ctx, tx, asked[c.GetNodeId()], c); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("keep records of hosts: %w", err)
	}
	return nil
}

// after keeps what is to be done about a request after an answer. A task that has ended is the end of it, whether it
// has succeeded or not.
func after(ctx context.Context, tx pgx.Tx, r requestRow, c *lifecyclev1.CollectedRecord) error {
	var err error
	switch t := c.GetTask(); {
	case r.NodeID == "":
	case t == nil:
		_, err = pg.Exec(ctx, tx, again, r.NodeID, r.Began, refusedAgain, true)
	case Ended(t.GetState()):
		_, err = pg.Exec(ctx, tx, end, r.NodeID, r.Began)
	default:
		_, err = pg.Exec(ctx, tx, again, r.NodeID, r.Began, openAgain, false)
	}
	return err
}

// Ended reports whether a task in that state is history. One in a state of a newer build may not be.
func Ended(s commonv1.TaskState) bool {
	switch s {
	case commonv1.TaskState_TASK_STATE_SUCCEEDED, commonv1.TaskState_TASK_STATE_FAILED,
		commonv1.TaskState_TASK_STATE_EXPIRED, commonv1.TaskState_TASK_STATE_CANCELLED,
		commonv1.TaskState_TASK_STATE_SUPERSEDED, commonv1.TaskState_TASK_STATE_OUTCOME_UNKNOWN:
		return true
	case commonv1.TaskState_TASK_STATE_UNSPECIFIED, commonv1.TaskState_TASK_STATE_QUEUED,
		commonv1.TaskState_TASK_STATE_DISPATCHED, commonv1.TaskState_TASK_STATE_DELIVERED,
		commonv1.TaskState_TASK_STATE_RUNNING:
	}
	return false
}
