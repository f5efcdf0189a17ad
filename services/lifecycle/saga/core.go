package saga

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/pg"
)

// Deps are the dependencies of the core.
type Deps struct {
	// DB logs in as the role lifecycle. Its sessions should have PoolSettings.
	DB       *pgxpool.Pool
	Registry *Registry
	Logger   *slog.Logger
	// Appended is notified after every commit that appended events: the sequencer's Wake. May be nil.
	Appended *events.Signal
	// Stalls returns how long a step of a definition, or with an empty step a run of it, may show no progress by the
	// policy in force; zero leaves it to the definition. It is called each time, so that a new policy also applies to runs
	// that are live already. May be nil.
	Stalls func(definition, step string) time.Duration
	// Resumed is called in the transaction that resumes paused runs. It postpones the deadlines that other packages keep
	// for these runs and their workspaces by the length of the pause. May be nil.
	Resumed func(ctx context.Context, tx pgx.Tx, runs []Resumed) error
	// Resuming locks the rows that Resumed is going to change and that come before runs in the order of locks: the tasks
	// of these runs. It is called before the runs are locked. May be nil.
	Resuming func(ctx context.Context, tx pgx.Tx, runIDs []string) error
	// Withdraw requests that agents stop the open tasks that a run's steps queued in the forward phase. It is called in
	// the transaction that cancels the run, before the run's row is locked. It must leave tasks of an undo alone: it is
	// called for a run that compensates already too. May be nil.
	Withdraw func(ctx context.Context, tx pgx.Tx, runID, reason string) error
	// OnPoint is called at every kill point besides the failpoint of that name; an error makes the driver drop the run
	// where it stands, as a crash would. For conformance tests; nil otherwise.
	OnPoint func(ctx context.Context, name string, at Place) error
}

// PoolSettings returns the session settings that suit the core's statements. These are long, and their best plan never
// depends on the values or on the sizes of tables: every row is found by an index. Planning them anew for each call
// would cost more than running them, and a plan made while the tables were empty would use sequential scans for as long
// as the connection lives.
func PoolSettings() map[string]string {
	return map[string]string{
		"plan_cache_mode": "force_generic_plan", "enable_seqscan": "off", "enable_hashjoin": "off", "enable_mergejoin": "off",
		"enable_bitmapscan": "off",
	}
}

// Stats counts what the drivers of a core did since the core was made.
type Stats struct {
	Started, Leased, Advanced, Parked, Succeeded, Failed, Stuck atomic.Int64
	// Lost counts attempts that a lease closed as lost; FencedOut counts refused writes of a driver that had lost its
	// lease.
	Lost, FencedOut, Abandoned, Stalled, Quarantined, Paused, Resumed atomic.Int64
	// LeaseErrors and BeatErrors count lease rounds and heartbeats whose transaction failed.
	LeaseErrors, BeatErrors atomic.Int64
}

// Core reads and writes the rows of runs, attempts, claims and workspaces. Its methods with a tx run within the
// caller's transaction; the caller calls Committed after the commit.
type Core struct {
	db       *pgxpool.Pool
	registry *Registry
	log      *slog.Logger
	runnable events.Signal // a run may be leased
	appended *events.Signal
	stalls   func(definition, step string) time.Duration
	resumed  func(ctx context.Context, tx pgx.Tx, runs []Resumed) error
	resuming func(ctx context.Context, tx pgx.Tx, runIDs []string) error
	withdraw func(ctx context.Context, tx pgx.Tx, runID, reason string) error
	onPoint  func(ctx context.Context, name string, at Place) error
	cancels  events.Signal // a run of which a driver here may hold the lease was cancelled
	// notified fires when events of any replica were numbered; nil until FollowRemoteWakes runs
	notified atomic.Pointer[events.Signal]
	reserved uint64      // workers that runs which are being started have taken; under driving
	resting  atomic.Bool // no run was live when a driver of this process last checked
	// asked is true if a cancel was written in a transaction for which Committed was not called yet, unless the Committed
	// of another transaction has reset it.
	asked atomic.Bool
	stats Stats

	driving sync.Mutex
	drivers []*Driver   // the drivers that run in this process
	unheard atomic.Bool // a transaction without an end hook (pg.OnEnd) has made runs due
}

// New checks the dependencies; it does not touch the database.
func New(deps Deps) (*Core, error) {
	if deps.DB == nil || deps.Registry == nil || deps.Logger == nil {
		return nil, errors.New("saga core needs a database, a registry and a logger")
	}
	return &Core{
		db: deps.DB, registry: deps.Registry, log: deps.Logger, appended: deps.Appended, stalls: deps.Stalls,
		onPoint: deps.OnPoint, resumed: deps.Resumed, resuming: deps.Resuming, withdraw: deps.Withdraw,
	}, nil
}

// Stats returns this core's counters.
func (c *Core) Stats() *Stats { return &c.stats }

// Committed is called after a commit that started, woke or changed a run: it wakes the sequencer of this process, and
// the drivers if their wake is not hooked to the end of the transaction.
func (c *Core) Committed() {
	if c.unheard.Load() {
		c.runnable.Notify()
	}
	if !c.asked.Swap(false) {
		c.appended.Notify()
		return
	}
	c.cancels.Notify()
	c.appended.Urge() // the replica that drives the run learns of its cancel by the event's number
}

// eventBuffer collects the rows that a transaction changed, and appends their events in one statement at its end.
// Attempts that change together with their run travel in the run's event.
type eventBuffer struct {
	list []events.Event
	runs map[string]*lifecyclev1.Run
	lone []*Attempt // attempts whose run has not been collected
}

func (j *eventBuffer) run(r *Run) {
	payload := r.Proto()
	if j.runs == nil {
		j.runs = map[string]*lifecyclev1.Run{}
	}
	if before := j.runs[r.ID]; before != nil {
		payload.ChangedSteps = before.GetChangedSteps()
		before.ChangedSteps = nil
	}
	j.runs[r.ID] = payload
	rest := j.lone[:0]
	for _, a := range j.lone {
		if a.RunID == r.ID {
			payload.ChangedSteps = append(payload.ChangedSteps, a.Proto())
		} else {
			rest = append(rest, a)
		}
	}
	j.lone = rest
	j.list = append(j.list, events.Event{
		Kind: "run.changed", AggregateType: "run", AggregateID: r.ID, AggregateVersion: r.Version, Payload: payload,
		Correlation: events.Correlation{
			CorrelationID: r.CorrelationID, TenantID: r.TenantID, WorkspaceID: r.WorkspaceID,
			WorkflowID: r.ID,
		},
	})
}

func (j *eventBuffer) step(a *Attempt) {
	if run := j.runs[a.RunID]; run != nil {
		run.ChangedSteps = append(run.ChangedSteps, a.Proto())
		return
	}
	copied := *a
	j.lone = append(j.lone, &copied)
}

func stepEvent(a *Attempt) events.Event {
	return events.Event{
		Kind: "step.changed", AggregateType: "step",
		AggregateID: fmt.Sprintf("%s/%d/%s/%d", a.RunID, a.Step, a.Dir, a.Attempt), AggregateVersion: a.Version,
		Payload:     a.Proto(),
		Correlation: events.Correlation{TenantID: a.TenantID, WorkspaceID: a.WorkspaceID, WorkflowID: a.RunID},
	}
}

func (j *eventBuffer) workspace(w *Workspace) error {
	payload, err := w.Proto()
	if err != nil {
		return err
	}
	j.list = append(j.list, events.Event{
		Kind: "workspace.changed", AggregateType: "workspace", AggregateID: w.ID, AggregateVersion: w.Version,
		Payload:     payload,
		Correlation: events.Correlation{TenantID: w.TenantID, WorkspaceID: w.ID, WorkflowID: w.RunID, NodeID: w.NodeID},
	})
	return nil
}

// flush appends the collected events. The caller gets no position token to wait for.
func (j *eventBuffer) flush(ctx context.Context, tx pgx.Tx) error {
	list := j.take()
	if len(list) == 0 {
		return nil
	}
	_, err := events.Append(ctx, tx, list...)
	return err
}

// flushPos is flush for a command that returns a position token: the id of the last event.
func (j *eventBuffer) flushPos(ctx context.Context, tx pgx.Tx) (string, error) {
	list := j.take()
	if len(list) == 0 {
		return "", nil
	}
	list[len(list)-1].Unnamed = false
	return events.Append(ctx, tx, list...)
}

// take returns the collected events, each marked as unnamed, and empties the buffer.
func (j *eventBuffer) take() []events.Event {
	for _, a := range j.lone {
		j.list = append(j.list, stepEvent(a))
	}
	list := j.list
	for i := range list {
		list[i].Unnamed = true
	}
	j.list, j.lone, j.runs = nil, nil, nil
	return list
}

// AnnounceWorkspace appends the event of a workspace's row as it is in tx, and returns the row and the position token.
// A caller that changes a column of workspace raises its version in the same UPDATE and calls AnnounceWorkspace before
// the commit.
func AnnounceWorkspace(ctx context.Context, tx pgx.Tx, workspaceID string) (Workspace, string, error) {
	w, err := GetWorkspace(ctx, tx, workspaceID)
	if err != nil {
		return Workspace{}, "", err
	}
	var j eventBuffer
	if err := j.workspace(&w); err != nil {
		return Workspace{}, "", err
	}
	pos, err := j.flushPos(ctx, tx)
	return w, pos, err
}

// GetWorkspace reads one workspace. A missing one is pgx.ErrNoRows.
func GetWorkspace(ctx context.Context, q pg.Querier, id string) (Workspace, error) {
	w, err := pg.One[Workspace](ctx, q, workspaceByID, id)
	if err != nil {
		return Workspace{}, fmt.Errorf("read workspace %s: %w", id, err)
	}
	return w, nil
}

// GetRun reads one run. A missing one is pgx.ErrNoRows.
func GetRun(ctx context.Context, q pg.Querier, id string) (Run, error) {
	r, err := pg.One[Run](ctx, q, runByID, id)
	if err != nil {
		return Run{}, fmt.Errorf("read run %s: %w", id, err)
	}
	return r, nil
}

// LiveRun reads the run that owns a workspace now, and returns false if there is none.
func LiveRun(ctx context.Context, q pg.Querier, workspaceID string) (Run, bool, error) {
	r, err := pg.One[Run](ctx, q, liveRun, workspaceID)
	if pg.IsNoRows(err) {
		return Run{}, false, nil
	}
	if err != nil {
		return Run{}, false, fmt.Errorf("read live run of workspace %s: %w", workspaceID, err)
	}
	return r, true, nil
}

// Timeline reads every attempt of a run in the order they began.
func Timeline(ctx context.Context, q pg.Querier, runID string) ([]Attempt, error) {
	// Read the open attempt first: an attempt that gets its row meanwhile is then read twice, and one that is closed
	// meanwhile at least once.
	open, err := pg.All[Run](ctx, q, openOfRun, runID)
	if err != nil {
		return nil, fmt.Errorf("read timeline of run %s: %w", runID, err)
	}
	out, err := pg.All[Attempt](ctx, q, timeline, runID)
	if err != nil {
		return nil, fmt.Errorf("read timeline of run %s: %w", runID, err)
	}
	for i := range open {
		a := openAttempt(&open[i])
		if !slices.ContainsFunc(out, func(b Attempt) bool { return a.Step == b.Step && a.Dir == b.Dir && a.Attempt == b.Attempt }) {
			out = append(out, a)
		}
	}
	return out, nil
}
