package reap

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/allocation"
	"github.com/gpuaas/mesh/services/lifecycle/placement"
	"github.com/gpuaas/mesh/services/lifecycle/rollback"
)

// ReaperDeps are the dependencies of a Reaper.
type ReaperDeps struct {
	Logger     *slog.Logger
	DB         *pgxpool.Pool
	Drivers    map[commonv1.PlacementDriver]placement.Driver
	Identities allocation.Identities
	Metrics    prometheus.Registerer
	// Committed is called after each commit that wrote events.
	Committed func()
}

// Reaper compares the drivers' own lists with lifecycle's database, and ends instances that no workspace owns. Belongs
// alone decides which it may end.
type Reaper struct {
	deps  ReaperDeps
	ended *prometheus.CounterVec
	left  *prometheus.CounterVec

	mu sync.Mutex
	// when all instances that a driver ever launched were last compared, and no orphan was left
	whole map[commonv1.PlacementDriver]time.Time
	// absent are instances that were given up and that are not in a driver's list of all that it ever launched: only
	// sweeps of everything read that list for them again.
	absent map[commonv1.PlacementDriver]map[givenUp]bool
}

// wholeEvery is the time between two sweeps that check every instance that was ever launched. The other sweeps check
// the instances that run, and those that have ended and were given up.
const wholeEvery = 10 * time.Minute

// Reaped counts what one sweep did.
type Reaped struct {
	Ended   int // orphans that are confirmed ended, and recorded so
	Left    int // orphans that could not be ended; the next sweep tries again
	Unknown int // instances that this database cannot account for; a sweep never ends them
}

// NewReaper returns a reaper with the given dependencies.
func NewReaper(deps ReaperDeps) (*Reaper, error) {
	r := &Reaper{
		deps: deps, whole: map[commonv1.PlacementDriver]time.Time{}, absent: map[commonv1.PlacementDriver]map[givenUp]bool{},
		ended: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "orphan_boxes_ended_total",
			Help: "Instances at a placement that no row and no run owned, ended by the sweep, by placement.",
		}, []string{"placement"}),
		left: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "orphan_boxes_left_total",
			Help: "Instances that a sweep found without an owner and left standing, by placement and by why: not_ended " +
				"could not be ended and is tried again, unknown is not of this database and is an operator's.",
		}, []string{"placement", "why"}),
	}
	if err := errors.Join(deps.Metrics.Register(r.ended), deps.Metrics.Register(r.left)); err != nil {
		return nil, fmt.Errorf("register metrics of orphans: %w", err)
	}
	return r, nil
}

// Sweep reads the list of every driver once. A driver that does not answer is an error, and does not keep the others
// from being swept.
func (r *Reaper) Sweep(ctx context.Context) (Reaped, error) {
	var total Reaped
	var errs []error
	for kind, driver := range r.deps.Drivers {
		one, err := r.sweepDriver(ctx, kind, driver)
		if err != nil {
			errs = append(errs, fmt.Errorf("sweep %s instances: %w", names.Of(kind), err))
			continue
		}
		r.left.WithLabelValues(names.Of(kind), "not_ended").Add(float64(one.Left))
		r.left.WithLabelValues(names.Of(kind), "unknown").Add(float64(one.Unknown))
		total.Ended, total.Left, total.Unknown = total.Ended+one.Ended, total.Left+one.Left, total.Unknown+one.Unknown
	}
	return total, errors.Join(errs...)
}

func (r *Reaper) sweepDriver(ctx context.Context, kind commonv1.PlacementDriver, driver placement.Driver) (Reaped,
	error,
) {
	// The list is read before the rows: every instance in it was committed here before it was launched, so the rows that
	// are read afterwards include it.
	instances, whole, err := r.listed(ctx, kind, driver)
	if err != nil {
		return Reaped{}, err
	}
	owners, err := OwnersOf(ctx, r.deps.DB, instances)
	if err != nil {
		return Reaped{}, err
	}
	var out Reaped
	var unknown []placement.Instance
	for i, b := range instances {
		switch v, why := Belongs(b, owners[i]); v {
		case Owned, Gone:
		case Unknown:
			if !b.EndedAt.IsZero() {
				continue
			}
			out.Unknown++
			unknown = append(unknown, b)
			r.deps.Logger.WarnContext(ctx,
				"an instance is not of this database and is left alone: `gpuaas instances end` ends it",
				append(r.attrs(kind, b), slog.String("why", why))...)
		case Orphan:
			switch ended, err := r.reap(ctx, kind, driver, b); {
			case err != nil:
				out.Left++
				r.deps.Logger.WarnContext(ctx, "orphaned instance not ended",
					append(r.attrs(kind, b), slog.String("why", why), obs.Err(err))...)
			case ended:
				out.Ended++
				r.ended.WithLabelValues(names.Of(kind)).Inc()
				r.deps.Logger.WarnContext(ctx, "orphaned instance ended", append(r.attrs(kind, b), slog.String("why", why))...)
			}
		}
	}
	changed := 0
	err = pg.InTx(ctx, r.deps.DB, func(ctx context.Context, tx pgx.Tx) error {
		changed, err = allocation.NoteUnaccounted(ctx, tx, kind, unknown)
		return err
	})
	if err == nil && changed > 0 {
		r.deps.Committed()
	}
	r.noteSweep(kind, whole, err == nil && out.Left == 0)
	return out, err
}

// givenUp is an instance whose claim was given up and is not known to be gone.
type givenUp struct {
	WorkspaceID string `db:"workspace_id" expr:"@.workspace_id::text"`
	Epoch       int64  `db:"epoch"`
}

// instancesGivenUp reads the index of claims that were given up. An instance without a row may be of any placement.
var instancesGivenUp = pg.Define(pg.RoleLifecycle, "reap.instances_given_up", `
		SELECT `+pg.Columns[givenUp]("c")+` FROM lifecycle.resource_claim c
		WHERE c.orphaned_at IS NOT NULL AND c.released_at IS NULL AND c.kind = $1
			AND NOT EXISTS (SELECT FROM lifecycle.instance i
			WHERE i.workspace_id = c.workspace_id AND i.epoch = c.epoch AND i.placement <> $2)`)

// listed returns the instances of a driver that a sweep checks, and whether these are all that it ever launched: they
// are the first time, every wholeEvery, and after a sweep that was not complete (see noteSweep).
func (r *Reaper) listed(ctx context.Context, kind commonv1.PlacementDriver,
	driver placement.Driver,
) ([]placement.Instance, bool, error) {
	r.mu.Lock()
	whole, absent := time.Since(r.whole[kind]) >= wholeEvery, r.absent[kind]
	r.mu.Unlock()
	list := driver.Standing
	if whole {
		list = driver.List
	}
	instances, err := list(ctx)
	if err != nil {
		return nil, false, fmt.Errorf("list instances: %w", err)
	}
	if whole {
		return instances, true, nil
	}
	claims, err := pg.All[givenUp](ctx, r.deps.DB, instancesGivenUp, allocation.KindInstance, names.Of(kind))
	if err != nil {
		return nil, false, fmt.Errorf("read what was given up: %w", err)
	}
	unlisted, still := map[givenUp]bool{}, map[givenUp]bool{}
	for _, c := range claims {
		if absent[c] {
			still[c] = true
		} else {
			unlisted[c] = true
		}
	}
	for _, b := range instances {
		delete(unlisted, givenUp{b.WorkspaceID, b.Epoch})
	}
	if len(unlisted) > 0 {
		all, err := driver.List(ctx)
		if err != nil {
			return nil, false, fmt.Errorf("list instances: %w", err)
		}
		for _, b := range all {
			if key := (givenUp{b.WorkspaceID, b.Epoch}); unlisted[key] {
				instances = append(instances, b)
				delete(unlisted, key)
			}
		}
		maps.Copy(still, unlisted)
	}
	r.mu.Lock()
	r.absent[kind] = still
	r.mu.Unlock()
	return instances, false, nil
}

// noteSweep notes the end of a sweep. After a sweep that left an orphan unended, or that could not write the
// unaccounted instances, the next sweep checks everything.
func (r *Reaper) noteSweep(kind commonv1.PlacementDriver, whole, well bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case !well:
		delete(r.whole, kind)
	case whole:
		r.whole[kind] = time.Now()
	}
}

func (r *Reaper) attrs(kind commonv1.PlacementDriver, b placement.Instance) []any {
	return []any{
		slog.String(obs.KeyWorkspaceID, b.WorkspaceID), slog.Int64("epoch", b.Epoch),
		slog.String("provider_id", b.ProviderID), slog.String("placement", names.Of(kind)),
		slog.Time("started_at", b.StartedAt),
	}
}

// reap ends one orphan and records it. It checks once more with the workspace's row locked, so that an operation that
// begins meanwhile is committed either before that, and owns the instance, or after it, and finds the instance ending.
func (r *Reaper) reap(ctx context.Context, kind commonv1.PlacementDriver, driver placement.Driver,
	b placement.Instance,
) (bool, error) {
	why, err := r.condemn(ctx, b)
	if err != nil || why == "" {
		return false, err
	}
	if err := driver.End(ctx, b.WorkspaceID, b.Epoch); err != nil {
		return false, fmt.Errorf("end instance: %w", err)
	}
	if placement.HasOwnInstance(kind) && ids.Valid(b.InstanceID) {
		_, err := r.deps.Identities.RetireInstance(ctx, &recoveryv1.RetireInstanceRequest{
			InstanceId: b.InstanceID, WorkspaceId: b.WorkspaceID, Epoch: b.Epoch,
			Reason: "its instance was an orphan and has ended",
		})
		if err != nil && !fault.Has(err, commonv1.Reason_REASON_NOT_FOUND) {
			return false, fmt.Errorf("retire identity of instance: %w", err)
		}
	}
	err = pg.InTx(ctx, r.deps.DB, func(ctx context.Context, tx pgx.Tx) error { return record(ctx, tx, kind, b, why) })
	if err != nil {
		return false, fmt.Errorf("record end of instance: %w", err)
	}
	r.deps.Committed()
	return true, nil
}

// condemn returns why the instance may be ended, empty if it may not after all: in rollback mode none may. An instance
// that has a row is marked ending before anything happens to it.
func (r *Reaper) condemn(ctx context.Context, b placement.Instance) (string, error) {
	reason := ""
	err := pg.InTx(ctx, r.deps.DB, func(ctx context.Context, tx pgx.Tx) error {
		reason = ""
		if still, err := rollback.Active(ctx, tx); err != nil || still {
			return err
		}
		if _, err := pg.Exec(ctx, tx, allocation.LockWorkspace, b.WorkspaceID); err != nil {
			return fmt.Errorf("lock workspace: %w", err)
		}
		owners, err := OwnersOf(ctx, tx, []placement.Instance{b})
		if err != nil {
			return err
		}
		v, why := Belongs(b, owners[0])
		if v != Orphan {
			return nil
		}
		reason = why
		i, ok, err := allocation.InstanceOf(ctx, tx, b.WorkspaceID, b.Epoch)
		if err != nil || !ok || i.State == commonv1.InstanceState_INSTANCE_STATE_ENDING ||
			i.State == commonv1.InstanceState_INSTANCE_STATE_ENDED {
			return err
		}
		_, err = allocation.SetInstance(ctx, tx, i, commonv1.InstanceState_INSTANCE_STATE_ENDING, "", "", "")
		return err
	})
	if err != nil {
		return "", fmt.Errorf("check orphan: %w", err)
	}
	r.deps.Committed()
	return reason, nil
}
