package saga

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
	"github.com/gpuaas/mesh/services/lifecycle/workspace"
)

// StartRequest is a request for a run on a workspace that exists.
type StartRequest struct {
	WorkspaceID string
	Kind        commonv1.OperationKind // create, retry, recreate or decommission
	Definition  string                 // the newest version of it is used
	Input       any                    // marshalled as JSON
	Requester   string
	// CorrelationID ties the run to the request; empty draws one.
	CorrelationID string
	// From are the workspace states in which this kind may start; empty means any.
	From []commonv1.WorkspaceState
	// JoinKinds are kinds of an open run, besides Kind itself, that serve this request as well.
	JoinKinds []commonv1.OperationKind
	// NextEpoch draws a new epoch for the workspace; otherwise the run keeps the present one.
	NextEpoch bool
	// OfEpoch, if set, is the only epoch of the workspace at which the run may begin; at another one Start returns a
	// conflict.
	OfEpoch int64
	// Round and ParentRunID tie a retry to the run that it follows; zero means round 1.
	Round       int
	ParentRunID string
	// DesiredState, if set, becomes the workspace's desired state.
	DesiredState string
	// RunID is the id of the run if this request makes it; empty draws one.
	RunID string

	// countRetry makes the run a counted retry: it begins only if the workspace is still reset and its count is still
	// retryUsed.
	countRetry bool
	retryUsed  int
}

// Started is the result of a Start.
type Started struct {
	RunID  string
	Kind   commonv1.OperationKind // of the run that serves the request
	Joined bool                   // it was open already
	Epoch  int64
	State  commonv1.WorkspaceState
	Pos    string // position token; empty if joined
}

// Start inserts a run, or joins the one that is open. An open run of another kind, or one that is being undone, is
// operation_in_progress with its id; a stuck one run_stuck; a workspace in a state outside From precondition_failed. tx
// is READ COMMITTED, so that it sees a run that a concurrent request has committed meanwhile.
func (c *Core) Start(ctx context.Context, tx pgx.Tx, req StartRequest) (Started, error) {
	def, ok := c.registry.Newest(req.Definition)
	if !ok {
		return Started{}, fmt.Errorf("start run: no definition %q", req.Definition)
	}
	input, err := json.Marshal(req.Input)
	if err != nil {
		return Started{}, fmt.Errorf("start run: marshal input: %w", err)
	}
	if req.Input == nil {
		input = []byte(`{}`)
	}
	if req.CorrelationID == "" {
		req.CorrelationID = ids.New()
	}
	if req.RunID == "" {
		req.RunID = ids.New()
	}
	req.Round = max(req.Round, 1)
	from := make([]string, 0, len(req.From))
	for _, state := range req.From {
		from = append(from, names.Of(state))
	}
	owner, length, why := "", time.Duration(0), "waiting for a worker" // an empty owner leaves the run in the queue
	own := c.reserve(ctx, tx)
	if own != nil {
		owner, length, why = own.Owner, own.Length, runs.Doing(runs.Do, def.Steps[0].Name)
	}
	// Both the insert and the read may find no run: the winner was not in the insert's snapshot and had ended when the
	// live run was read, or the other way round. Then the statement is tried once more.
	for range 2 {
		// The epoch is compared and set, because the run's epoch was read from the workspace's row before that row was
		// locked.
		row, err := pg.One[startedRow](ctx, tx, startRun,
			req.RunID, req.WorkspaceID, names.Of(req.Kind), def.Name, def.Version, req.Round, req.ParentRunID,
			req.CorrelationID, req.Requester, def.stepNames(), input, req.NextEpoch, def.Deadline.Seconds(),
			names.Of(def.States.Running), req.DesiredState, boolInt(req.countRetry), from, req.retryUsed, req.OfEpoch,
			owner, why, length.Seconds())
		if err == nil {
			return c.begin(ctx, tx, def, req, input, &row, why, own)
		}
		if !pg.IsNoRows(err) {
			return Started{}, fmt.Errorf("start run: %w", err)
		}
		live, found, err := runs.Live(ctx, tx, req.WorkspaceID)
		if err != nil {
			return Started{}, err
		}
		if found {
			return c.joinOrRefuse(ctx, tx, req, &live)
		}
	}
	return Started{}, fault.New(commonv1.Reason_REASON_CONFLICT,
		"another operation on this workspace began and ended just now")
}

// reserve takes a free worker of a driver of this process for a run that tx is about to start. It returns nil if none
// is free, or if tx takes no end hook (pg.OnEnd).
func (c *Core) reserve(ctx context.Context, tx pgx.Tx) *Worker {
	var d Driver
	var own *Worker
	c.driving.Lock()
	for _, d = range c.drivers {
		if own = d.Reserve(); own != nil {
			c.reserved++
			c.resting.Store(false)
			break
		}
	}
	c.driving.Unlock()
	if own == nil {
		return nil
	}
	ended := func(committed bool) {
		if !committed && !pg.OutcomeUnknown(tx) {
			own.Run = nil // it was not inserted; a run of its id is that of a later try, and leased
		}
		d.DriveOrFree(context.WithoutCancel(ctx), own, committed)
	}
	if !pg.OnEnd(tx, ended) {
		d.DriveOrFree(ctx, own, false)
		return nil
	}
	return own
}

// joinOrRefuse joins the run that is live, unless that is the one which was just inserted and did not get its
// workspace.
func (c *Core) joinOrRefuse(ctx context.Context, tx pgx.Tx, req StartRequest, live *runs.Run) (Started, error) {
	if live.ID != req.RunID {
		return c.join(ctx, tx, req, live)
	}
	w, err := workspace.Get(ctx, tx, req.WorkspaceID)
	switch {
	case err != nil:
		return Started{}, err
	case w.RunID == live.ID: // an earlier request has started it by the same id
		return c.join(ctx, tx, req, live)
	default:
		return Started{}, c.refuseStart(ctx, tx, req)
	}
}

// startedRow is the row of the workspace that the run was given, with the columns of the run's row that the database
// computed.
type startedRow struct {
	workspace.Row
	RunOpSeq    int64      `db:"run_op_seq"`
	OpLast      int64      `db:"run_op_last"`
	RunCreated  time.Time  `db:"run_created_at"`
	NextAt      time.Time  `db:"run_next_at"`
	DeadlineAt  *time.Time `db:"run_deadline_at"`
	Fence       int64      `db:"run_fence"`
	LeaseUntil  *time.Time `db:"run_lease_until"`
	HeartbeatAt *time.Time `db:"run_heartbeat_at"`
	OpenSince   *time.Time `db:"run_open_since"`
	TriedSince  time.Time  `db:"run_tried_since"`
	Paused      bool       `db:"paused"`
}

// begin appends the events of the run that was just started, and gives it to the worker that waits for it.
func (c *Core) begin(ctx context.Context, tx pgx.Tx, def *Definition, req StartRequest, input []byte, row *startedRow,
	why string, own *Worker,
) (Started, error) {
	w := &row.Row
	run := &runs.Run{
		ID: req.RunID, WorkspaceID: w.ID, TenantID: w.TenantID, Kind: names.Of(req.Kind), Definition: def.Name,
		DefVersion: def.Version, Round: req.Round, ParentRunID: req.ParentRunID, CorrelationID: req.CorrelationID,
		Requester: req.Requester, StepNames: def.stepNames(), Input: input, Epoch: w.Epoch, State: runs.Pending,
		Phase: runs.Do, NextAt: row.NextAt, DeadlineAt: row.DeadlineAt, WhyWaiting: why, ErrorStep: -1,
		CreatedAt: row.RunCreated, TriedSince: row.TriedSince, OpSeq: row.RunOpSeq, OpLast: row.OpLast,
		Version: 1,
	}
	if w.OpSeq != run.OpLast {
		run.OpSeq += w.OpSeq - run.OpLast
		run.OpLast = w.OpSeq
		if err := pg.Queue(ctx, tx, giveRange, run.ID, run.OpSeq, run.OpLast); err != nil {
			return Started{}, fmt.Errorf("give range of numbers: %w", err)
		}
	}
	var buffer runs.Buffer
	if own == nil {
		c.makesDue(tx)
	} else {
		run.State, run.Owner, run.Fence, run.LeaseUntil, run.HeartbeatAt = runs.Running, own.Owner, row.Fence,
			row.LeaseUntil, row.HeartbeatAt
		run.OpenAttempt, run.OpenSince = 1, row.OpenSince
		open := def.Open(run)
		buffer.Attempt(&open)
		own.Run, own.Def, own.Paused = run, def, row.Paused
	}
	buffer.Run(run)
	if err := buffer.Workspace(w); err != nil {
		return Started{}, err
	}
	pos, err := buffer.FlushPos(ctx, tx)
	if err != nil {
		return Started{}, err
	}
	c.stats.Started.Add(1)
	return Started{RunID: run.ID, Kind: req.Kind, Epoch: run.Epoch, State: def.States.Running, Pos: pos}, nil
}

// healthyReset is the SQL of the retries counted so far: zero after an hour in the state active.
const healthyReset = `CASE WHEN w.state = 'active' AND mesh.clock() - w.state_at >= interval '1 hour' THEN 0
	ELSE w.retry_used END`

func boolInt(b bool) int {
	if b {
		return 1
	}
	return 0
}
