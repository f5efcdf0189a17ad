package ask

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
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
	// answerWithin is how long a task of which lifecycle has told may go without an end.
	answerWithin = 5 * time.Minute
	// openAgain is how often lifecycle is asked for a task that has not ended; refusedAgain is when it is asked again
	// after it has refused one, or did not answer.
	openAgain    = 500 * time.Millisecond
	refusedAgain = 30 * time.Second
	// idlePeriod is the time between two rounds while no request is under way.
	idlePeriod = 30 * time.Second
	// timeout bounds the requests of one round.
	timeout = 4 * time.Second
	// lock is the key of the advisory lock under which requests are taken.
	lock = 0x617365726b
)

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
	away bool          // lifecycle did not answer in the last round that asked it; of the goroutine that asks
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
			if a.away { // a new request is no reason to ask earlier
				news = nil
			}
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
		case a.away:
			a.next = refusedAgain
		case asked == 0:
			a.next = idlePeriod
		default:
			a.next = openAgain
		}
		return nil
	})
}

// Once asks lifecycle for the records of nodes that are due, and keeps what became of them. It returns for how many
// nodes it asked. While lifecycle does not answer Once returns no error; it logs the first failed call of an outage.
func (a *Asker) Once(ctx context.Context) (int, error) {
	list, err := a.take(ctx)
	if err != nil || len(list) == 0 {
		return 0, err
	}
	got, err := a.ask(ctx, list)
	if got.why != nil && !a.away && ctx.Err() == nil {
		a.deps.Logger.WarnContext(ctx, "lifecycle does not answer for records of hosts; requests wait",
			slog.Int("nodes", len(got.left)), slog.Any(obs.KeyError, got.why))
	}
	a.away = got.why != nil
	return len(list), errors.Join(err, a.keep(ctx, list, got.answers), a.release(ctx, got.left))
}

// heard is what lifecycle answered, and about which nodes it did not and why; a nil error: it answered about all.
type heard struct {
	answers []*lifecyclev1.CollectedRecord
	left    []requestRow
	why     error
}

// ask asks lifecycle for nodes. A request that it refuses as a whole is repeated for each node alone; one that is
// refused alone is ended.
func (a *Asker) ask(ctx context.Context, list []requestRow) (heard, error) {
	call, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	answers, err := a.call(call, list)
	if err == nil {
		return heard{answers: answers}, nil
	}
	if !malformed(err) {
		return heard{left: list, why: err}, nil
	}
	var out heard
	var failed []error
	for i, r := range list {
		one, cause := a.call(call, list[i:i+1])
		switch {
		case cause == nil:
			out.answers = append(out.answers, one...)
		case malformed(cause):
			a.deps.Logger.WarnContext(ctx, "lifecycle refuses to collect the record of a host",
				slog.String(obs.KeyNodeID, r.NodeID), slog.Any(obs.KeyError, cause))
			if _, err := pg.Exec(ctx, a.deps.Pool, end, r.NodeID, r.Began); err != nil {
				failed = append(failed, fmt.Errorf("end request for the record of a host: %w", err))
			}
		default:
			out.left, out.why = list[i:], cause
			return out, errors.Join(failed...)
		}
	}
	return out, errors.Join(failed...)
}

func (a *Asker) call(ctx context.Context, list []requestRow) ([]*lifecyclev1.CollectedRecord, error) {
	req := &lifecyclev1.CollectRecordsRequest{}
	for _, r := range list {
		req.Nodes = append(req.Nodes, &lifecyclev1.RecordRequest{
			NodeId: r.NodeID, IdempotencyKey: r.key(), CorrelationId: r.CorrelationID,
		})
	}
	answer, err := a.deps.Records.CollectRecords(
		obs.With(ctx, obs.Correlation{CorrelationID: list[0].CorrelationID}), req)
	return answer.GetNodes(), err
}

// malformed reports whether a request was refused for its content, or its answer for its size: the same request would
// be refused again.
func malformed(err error) bool {
	reason := fault.ReasonOf(err)
	return reason == commonv1.Reason_REASON_INVALID_ARGUMENT || reason == commonv1.Reason_REASON_FRAME_TOO_LARGE
}

// release has lifecycle asked again about nodes that it did not answer about.
func (a *Asker) release(ctx context.Context, list []requestRow) error {
	if len(list) == 0 {
		return nil
	}
	nodeIDs, began := make([]string, len(list)), make([]int64, len(list))
	for i, r := range list {
		nodeIDs[i], began[i] = r.NodeID, r.Began
	}
	if _, err := pg.Exec(ctx, a.deps.Pool, unanswered, nodeIDs, began, refusedAgain); err != nil {
		return fmt.Errorf("free the places of requests for records of hosts: %w", err)
	}
	return nil
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
		if _, err := pg.Exec(ctx, tx, giveUp, answerWithin, collect.ActiveState); err != nil {
			return err
		}
		list, err = pg.All[requestRow](ctx, tx, take, mostUnderWay, lease, collect.ActiveState)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("take requests for records of hosts: %w", err)
	}
	return list, nil
}

// keep stores the answers of lifecycle, each in a transaction of its own.
func (a *Asker) keep(ctx context.Context, list []requestRow, answers []*lifecyclev1.CollectedRecord) error {
	asked := make(map[string]requestRow, len(list))
	for _, r := range list {
		asked[r.NodeID] = r
	}
	var failed []error
	for _, c := range answers {
		r, known := asked[c.GetNodeId()]
		if !known {
			continue
		}
		err := pg.InTx(ctx, a.deps.Pool, func(ctx context.Context, tx pgx.Tx) error { return keepOne(ctx, tx, r, c) })
		if err != nil {
			failed = append(failed, fmt.Errorf("keep record of the host of node %s: %w", r.NodeID, err))
		}
	}
	return errors.Join(failed...)
}

// keepOne keeps what an answer brought, and what is to be done about its request. The row of the node is locked before
// that of the request, as the judge does. A task that has ended is the end of the request, whether it has succeeded or
// not.
func keepOne(ctx context.Context, tx pgx.Tx, r requestRow, c *lifecyclev1.CollectedRecord) error {
	if len(c.GetDiagnostics()) > 0 {
		_, _, err := collect.MergeHost(ctx, tx, r.NodeID, collect.RecordsOf(c.GetDiagnostics()), r.CorrelationID)
		if err != nil && fault.ReasonOf(err) != commonv1.Reason_REASON_NOT_FOUND {
			return err
		}
	}
	var err error
	switch t := c.GetTask(); {
	case t == nil:
		_, err = pg.Exec(ctx, tx, refused, r.NodeID, r.Began, refusedAgain)
	case Ended(t.GetState()):
		_, err = pg.Exec(ctx, tx, end, r.NodeID, r.Began)
	default:
		_, err = pg.Exec(ctx, tx, open, r.NodeID, r.Began, openAgain)
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
