package watchdog

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/failpoint"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/recovery/churn"
	"github.com/gpuaas/mesh/services/recovery/fleet"
	"github.com/gpuaas/mesh/services/recovery/rollback"
	"github.com/gpuaas/mesh/services/recovery/wave"
)

// Round counts what one round did.
type Round struct {
	Leased     bool // this replica has the lease
	Opened     int  // records that were opened
	Asked      int  // requests that were sent, again or for the first time
	Ended      int  // records that have ended
	Engaged    bool // the brake
	RolledBack bool // rollback mode is active: no rule was applied
}

// parallel requests of one round.
const parallel = 8

// RunOnce makes one round: in one transaction it takes or keeps the lease, evaluates and stores requests; then it sends
// the requests.
func (w *Watchdog) RunOnce(ctx context.Context) (Round, error) {
	out := Round{}
	noting, appended := events.Noting(ctx)
	asks, err := w.evaluate(noting, &out)
	if err != nil {
		return out, fmt.Errorf("judge workspaces: %w", err)
	}
	if !out.Leased {
		return out, nil
	}
	if appended() {
		w.deps.Wake.Notify()
	}
	out.Asked = len(asks)
	return out, w.ask(ctx, asks)
}

var takeOrKeepLease = pg.Define(pg.RoleRecovery, "watchdog.hold_lease", `
	WITH taken AS (
		UPDATE recovery.watchdog_lease SET holder = $1, until = mesh.clock() + make_interval(secs => $2)
		WHERE until <= mesh.clock() OR (holder = $1 AND until <= mesh.clock() + make_interval(secs => $2 * 2 / 3))
			RETURNING 1)
	SELECT EXISTS (SELECT FROM taken) OR EXISTS (SELECT FROM recovery.watchdog_lease
		WHERE holder = $1 AND until > mesh.clock())`)

// takeLease takes or keeps the lease, and reports whether this replica has it. The lease is renewed only when a third
// of it has passed.
func (w *Watchdog) takeLease(ctx context.Context, tx pgx.Tx) (bool, error) {
	mine, err := pg.Value[bool](ctx, tx, takeOrKeepLease, w.deps.Replica, w.cfg.Lease.Seconds())
	if err != nil {
		return false, fmt.Errorf("take the watchdog's lease: %w", err)
	}
	return mine, nil
}

// evaluation is the state of one round.
type evaluation struct {
	w        *Watchdog
	tx       pgx.Tx
	now      time.Time
	fleet    *fleet.Round
	listened bool // some replica of nodeapi did before the subjects were read
	subjects []*subject
	of       map[string]*subject
	records  map[string]*record // open ones, by workspace
	budget   *churn.Budgets     // nil until they are read
	rate     int                // recreations an hour
	auto     bool               // what a machine came back without is recreated
	out      *Round
	counts   []prometheus.Counter // counters of the changes, to be incremented after the commit
	forgot   bool                 // facts that are over were deleted; noted after the commit
}

// evaluate applies the rules to the present facts, writes all changes that follow, and returns the records whose
// request must be sent. It begins without locks on rows of the brake, of records and of incidents, since a row lock is
// written to the write-ahead log. If there is anything to write it begins again with the locks, and then reads what
// others have written under them.
func (w *Watchdog) evaluate(ctx context.Context, out *Round) ([]*record, error) {
	asks, err := w.evaluateOnce(ctx, out, false)
	if errors.Is(err, fleet.ErrUnlocked) {
		asks, err = w.evaluateOnce(ctx, out, true)
	}
	return asks, err
}

func (w *Watchdog) evaluateOnce(ctx context.Context, out *Round, locked bool) ([]*record, error) {
	var asks []*record
	var counts []prometheus.Counter
	var forgot time.Time
	err := pg.InTx(ctx, w.deps.Pool, func(ctx context.Context, tx pgx.Tx) error {
		*out, asks, counts, forgot = Round{}, nil, nil, time.Time{}
		leased, err := w.takeLease(ctx, tx)
		if err != nil || !leased {
			return err
		}
		out.Leased = true
		// The database may be older than the workspaces, so no decision is made from it.
		if rolledBack, err := rollback.Active(ctx, tx); err != nil || rolledBack {
			out.RolledBack = rolledBack
			return err
		}
		now, err := fleet.Clock(ctx, tx)
		if err != nil {
			return err
		}
		set := w.deps.Policy.Current()
		// Every decision that leads to a write or a request is made under the lock on the brake's row, so that two replicas
		// that act at once do so one after the other.
		j := &evaluation{
			w: w, tx: tx, now: now, rate: set.ChurnRecreatesPerHour(), auto: set.AutoRecovery(), out: out,
			of: map[string]*subject{},
		}
		if j.fleet, err = w.deps.Fleet.Begin(ctx, tx, now, locked); err != nil {
			return err
		}
		if j.records, err = loadOpen(ctx, tx, locked); err != nil {
			return err
		}
		// This is read before the subjects, since those of machines are read only if a replica listens.
		if j.listened, err = pg.Value[bool](ctx, tx, replicaListens); err != nil {
			return fmt.Errorf("read who listens: %w", err)
		}
		if j.subjects, err = loadSubjects(ctx, tx, set.HeartbeatStaleAfter(), now); err != nil {
			return err
		}
		operations, err := loadOperations(ctx, tx, j.records)
		if err != nil {
			return err
		}
		for _, s := range j.subjects {
			j.of[s.WorkspaceID] = s
			if r := j.records[s.WorkspaceID]; r != nil && r.Following {
				s.Op = operations[r.OperationID]
			}
		}
		asks, err = j.all(ctx)
		if err != nil {
			return err
		}
		counts = j.counts
		if j.forgot {
			forgot = now
		}
		return failpoint.Hit("recovery.watchdog.before_commit")
	})
	if err == nil {
		count(counts)
		if !forgot.IsZero() {
			w.forgot = forgot
		}
	}
	return asks, err
}

func (j *evaluation) all(ctx context.Context) ([]*record, error) {
	for _, part := range []func(context.Context) error{j.detectAll, j.manual, j.machines} {
		if err := part(ctx); err != nil {
			return nil, err
		}
	}
	if err := j.fleet.EvaluateBrake(ctx, j.concerned); err != nil {
		return nil, err
	}
	j.out.Engaged = j.fleet.Engaged()
	asks, err := j.recordsAll(ctx)
	if err != nil {
		return nil, err
	}
	if err := j.budgets(ctx); err != nil {
		return nil, err
	}
	if err := j.fleet.Classes(ctx); err != nil {
		return nil, err
	}
	if j.now.Sub(j.w.forgot) > time.Minute {
		if err := wave.Forget(ctx, j.tx); err != nil {
			return nil, err
		}
		more, err := forget(ctx, j.tx, j.w.cfg.ForgetAfter)
		j.forgot = !more // the next round goes on
		return asks, err
	}
	return asks, nil
}

// recordsAll applies the rules to each open record, writes those that changed, and returns those whose request must be
// sent.
func (j *evaluation) recordsAll(ctx context.Context) ([]*record, error) {
	var asks, changed []*record
	for _, id := range j.order() {
		r := j.records[id]
		before := *r
		asked, err := j.step(ctx, r, j.of[id])
		if err != nil {
			return nil, err
		}
		differs := !same(before, *r)
		if asked || differs {
			if err := j.fleet.Writes(); err != nil {
				return nil, err
			}
		}
		if asked {
			asks = append(asks, r)
		}
		if !differs {
			continue
		}
		changed = append(changed, r)
		j.counts = append(j.counts, j.w.metrics.moved(&before, r)...)
		if r.EndedAt != nil {
			j.out.Ended++
		}
	}
	if j.budget != nil {
		if err := j.budget.Save(ctx, j.tx); err != nil {
			return nil, err
		}
	}
	return asks, saveRecords(ctx, j.tx, changed...)
}

// concerned adds the workspaces of the open records to an incident.
func (j *evaluation) concerned(i *fleet.Incident) {
	for _, r := range j.records {
		i.About(r.TenantID, r.WorkspaceID, r.NodeID)
	}
}

// order returns the workspaces of the records in the order of their detections.
func (j *evaluation) order() []string {
	return slices.SortedFunc(maps.Keys(j.records), func(a, b string) int {
		ra, rb := j.records[a], j.records[b]
		return cmp.Or(ra.DetectedAt.Compare(rb.DetectedAt), cmp.Compare(ra.ID, rb.ID))
	})
}

// detectAll opens a record of each workspace that needs a recovery and has none.
func (j *evaluation) detectAll(ctx context.Context) error {
	var found []*record
	for _, s := range j.subjects {
		if j.records[s.WorkspaceID] != nil {
			continue
		}
		trigger := detect(s, j.w.cfg, j.now)
		if trigger == 0 || trigger == triggerEmptied && !j.auto {
			continue
		}
		if err := j.fleet.Writes(); err != nil {
			return err
		}
		found = append(found, open(s, trigger, j.now))
	}
	inserted, err := insertRecords(ctx, j.tx, found)
	if err != nil {
		return err
	}
	for _, r := range inserted {
		j.out.Opened++
		j.counts = append(j.counts, j.w.metrics.found.WithLabelValues(names.Of(r.Trigger)))
		j.records[r.WorkspaceID] = r
		j.w.deps.Logger.WarnContext(ctx, "a workspace needs a recovery", slog.String(obs.KeyWorkspaceID, r.WorkspaceID),
			slog.String(obs.KeyCorrelationID, r.CorrelationID), slog.String("trigger", names.Of(r.Trigger)),
			slog.String("step", r.Step))
	}
	return nil
}

// step applies the rules to one record, and reports whether its request must be sent.
func (j *evaluation) step(ctx context.Context, r *record, s *subject) (bool, error) {
	cfg := j.w.cfg
	wanted := follow(r, s, cfg, j.now)
	switch wanted {
	case replay:
		return true, nil
	case withdraw:
		if err := j.fleet.Writes(); err != nil {
			return false, err
		}
		budget, err := j.readBudget(ctx)
		if err != nil {
			return false, err
		}
		budget.GiveBack(r.target())
		return false, nil
	case nothing:
		return false, nil
	case repeat, recreate:
	}
	if r.ByPerson || j.withheld(r, s) {
		return false, nil
	}
	if wanted == repeat {
		if r.WithheldBy != "" {
			r.proceed()
		}
		return true, nil
	}
	if r.WithheldBy == withheldByOwner && r.NextAt != nil && r.NextAt.After(j.now) {
		return false, nil
	}
	if j.now.Sub(r.DetectedAt) < cfg.FirstRequestAfter {
		return false, nil
	}
	wait, err := j.take(ctx, r)
	if err != nil || wait != nil {
		if wait != nil {
			r.withhold(wait.By(), wait.Because(), &wait.Until)
		}
		return false, err
	}
	r.proceed()
	r.Asked++
	r.AskedEpoch = s.Epoch
	if r.StartedAt == nil {
		now := j.now
		r.StartedAt = &now
	}
	return true, nil
}

// withheld reports whether anything but a budget withholds the recreation of a workspace, and records the cause.
func (j *evaluation) withheld(r *record, s *subject) bool {
	switch {
	case j.fleet.Engaged():
		r.withhold(withheldByBrake, "the fleet brake is engaged: too much failed at once for single causes; otherwise "+
			"lifecycle would be asked to recreate the workspace", nil)
	case s.Identity != "" && s.Identity != "active" && s.Identity != "pending" && s.Identity != "retired":
		r.withhold(withheldByIdentity,
			"the identity of its node is "+s.Identity+
				", which is no failure of the instance: it stays as it is until that is decided", nil)
	case awaitsInstance(s.Run, s) && s.Reach == reachUnknown:
		r.withhold(withheldByDeafness,
			"nobody has listened to instances for long enough: that its instance has no session says nothing yet", nil)
	case s.static() && s.Reach == reachLost:
		r.withhold(withheldByMachine, "its machine cannot be asked, so that nothing proves that its work has ended", nil)
	default:
		return false
	}
	return true
}

// same reports whether two records are equal, so that nothing needs to be written. Times that are computed anew each
// round differ by less than a second, and count as equal.
func same(a, b record) bool {
	near := func(x, y *time.Time) bool {
		if x == nil || y == nil {
			return x == y
		}
		return x.Sub(*y).Abs() < time.Second
	}
	if !near(a.NextAt, b.NextAt) || !near(a.StartedAt, b.StartedAt) || !near(a.EndedAt, b.EndedAt) {
		return false
	}
	a.NextAt, a.StartedAt, a.EndedAt, b.NextAt, b.StartedAt, b.EndedAt = nil, nil, nil, nil, nil, nil
	return a == b
}

// ask sends the stored requests of records. It sends the others even if one fails.
func (w *Watchdog) ask(ctx context.Context, asks []*record) error {
	failures := make([]error, len(asks))
	var calls sync.WaitGroup
	slots := make(chan struct{}, parallel)
	for i, r := range asks {
		slots <- struct{}{}
		calls.Go(func() {
			defer func() { <-slots }()
			failures[i] = w.request(ctx, r)
		})
	}
	calls.Wait()
	if len(asks) > 0 {
		w.deps.Wake.Notify()
	}
	return errors.Join(failures...)
}
