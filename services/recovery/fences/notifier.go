package fences

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/config"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/failpoint"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/recovery/identity"
)

// Gate applies fences in lifecycle.
type Gate interface {
	ApplyFence(ctx context.Context, req *lifecyclev1.ApplyFenceRequest) (*lifecyclev1.ApplyFenceResponse, error)
}

// Config bounds the loop; zero fields take the defaults.
type Config struct {
	Poll     time.Duration // between reads without a wake; 500 ms, and ten seconds while Numbered listens
	Batch    int           // nodes of one round; 64
	Parallel int           // calls at once; 8
	Timeout  time.Duration // of one call; 3 s
	Retry    time.Duration // before an unacknowledged node is due again; 1 s
}

var defaults = Config{
	Poll: 500 * time.Millisecond, Batch: 64, Parallel: 8, Timeout: 3 * time.Second, Retry: time.Second,
}

// Deps are the dependencies of the loop.
type Deps struct {
	Logger *slog.Logger
	Pool   *pgxpool.Pool
	Gate   Gate
	// Notices wakes the loop; Wake is notified after the loop appended events. Numbered wakes it for fences of other
	// replicas, and may be nil.
	Notices, Wake, Numbered *events.Signal
}

// Notifier sends fences to lifecycle until lifecycle has acknowledged them. Every replica runs one: a fence that is
// sent twice is harmless, one that is sent late is not.
type Notifier struct {
	deps   Deps
	cfg    Config
	failed bool
}

// New checks its dependencies.
func New(deps Deps, cfg Config) (*Notifier, error) {
	if deps.Logger == nil || deps.Pool == nil || deps.Gate == nil {
		return nil, errors.New("notifier needs a logger, a pool and lifecycle's gate")
	}
	return &Notifier{deps: deps, cfg: config.Or(cfg, defaults)}, nil
}

// stillOwed is how long after a failure the loop goes on reading unacknowledged fences at the short period, since each
// attempt puts them off by a second.
const stillOwed = 15 * time.Second

// Run sends fences until ctx ends.
func (t *Notifier) Run(ctx context.Context) error {
	var owed time.Time
	for {
		wake, numbered := t.deps.Notices.C(), t.deps.Numbered.C()
		sent, err := t.runOnce(ctx)
		if ctx.Err() != nil {
			return nil //nolint:nilerr // asked to stop
		}
		t.note(ctx, err)
		if err == nil && sent == t.cfg.Batch {
			continue
		}
		if err != nil { // no wake or event announces the end of the failure
			owed = time.Now().Add(stillOwed)
			timer := time.NewTimer(t.cfg.Poll)
			select {
			case <-ctx.Done():
			case <-timer.C:
			}
			timer.Stop()
			continue
		}
		if time.Now().Before(owed) {
			// A fence that was not acknowledged is due again in a moment, and no signal wakes the loop for it.
			if !t.deps.Numbered.PaceWithin(ctx, wake, numbered, t.cfg.Poll, t.cfg.Poll) {
				return nil
			}
			continue
		}
		// A fence of another replica comes with an event.
		if !t.deps.Numbered.Pace(ctx, wake, numbered, t.cfg.Poll) {
			return nil
		}
	}
}

// note logs the first failure of a series and the end of the series, since lifecycle may be unreachable for an hour.
func (t *Notifier) note(ctx context.Context, err error) {
	switch {
	case err != nil && !t.failed:
		t.deps.Logger.WarnContext(ctx, "telling lifecycle of identities failed", slog.Any(obs.KeyError, err))
	case err == nil && t.failed:
		t.deps.Logger.InfoContext(ctx, "lifecycle is told of identities again")
	}
	t.failed = err != nil
}

type acknowledged struct {
	record *identity.Record
	fence  int64 // the fence that lifecycle has applied
}

func (t *Notifier) runOnce(ctx context.Context) (int, error) {
	due, err := t.take(ctx)
	if err != nil || len(due) == 0 {
		return 0, err
	}
	acks := make([]acknowledged, len(due))
	failures := make([]error, len(due))
	var calls sync.WaitGroup
	slots := make(chan struct{}, t.cfg.Parallel)
	for i, r := range due {
		slots <- struct{}{}
		calls.Go(func() {
			defer func() { <-slots }()
			// The fences of the other nodes are sent even if one fails.
			if fence, err := t.applyFence(ctx, r); err != nil {
				failures[i] = err
			} else {
				acks[i] = acknowledged{record: r, fence: fence}
			}
		})
	}
	calls.Wait()
	if err := failpoint.Hit("recovery.tell_lifecycle.before_ack"); err != nil {
		return 0, err
	}
	acks = slices.DeleteFunc(acks, func(a acknowledged) bool { return a.record == nil })
	if err := t.acknowledge(ctx, acks); err != nil {
		return 0, err
	}
	return len(due), errors.Join(failures...)
}

// take returns the nodes that are due and sets when they are due again, so that replicas share the work and a refused
// fence is not sent again at once.
func (t *Notifier) take(ctx context.Context) ([]*identity.Record, error) {
	due, err := identity.TakeUnacknowledged(ctx, t.deps.Pool, t.cfg.Batch, t.cfg.Retry)
	if err != nil {
		return nil, err
	}
	// A node in a state that this build does not know is left to a replica of the build that wrote the state.
	return slices.DeleteFunc(due, func(r *identity.Record) bool { return !r.Readable() }), nil
}

func (t *Notifier) applyFence(ctx context.Context, r *identity.Record) (int64, error) {
	ctx, cancel := context.WithTimeout(obs.With(ctx, obs.Correlation{
		CorrelationID: ids.New(), NodeID: r.NodeID, NodeInstanceID: r.InstanceID, WorkspaceID: r.WorkspaceID,
		TenantID: r.TenantID,
	}), t.cfg.Timeout)
	defer cancel()
	req := &lifecyclev1.ApplyFenceRequest{
		NodeId: r.NodeID, FenceEpoch: r.FenceEpoch,
		Admitted: r.State == commonv1.NodeIdentityState_NODE_IDENTITY_STATE_ACTIVE, NodeInstanceId: r.InstanceID,
		Name: r.Name, InstanceId: r.LaunchedInstanceID, WorkspaceId: r.WorkspaceID, Epoch: r.Epoch,
		Retired:          r.State == commonv1.NodeIdentityState_NODE_IDENTITY_STATE_RETIRED,
		RegisterFailures: r.RefusedRegisters, RegisterError: names.OfSet(r.LastRefusal),
	}
	resp, err := t.deps.Gate.ApplyFence(ctx, req)
	if err != nil {
		return 0, fmt.Errorf("apply fence %d of node %s: %w", r.FenceEpoch, r.NodeID, err)
	}
	return resp.GetFenceEpoch(), nil
}

func (t *Notifier) acknowledge(ctx context.Context, acks []acknowledged) error {
	if len(acks) == 0 {
		return nil
	}
	nodeIDs := make([]string, len(acks))
	for i, a := range acks {
		nodeIDs[i] = a.record.NodeID
	}
	err := pg.InTx(ctx, t.deps.Pool, func(ctx context.Context, tx pgx.Tx) error {
		records, err := identity.Lock(ctx, tx, nodeIDs...)
		if err != nil {
			return err
		}
		m, err := identity.ReadMoment(ctx, tx)
		if err != nil {
			return err
		}
		var quiet, loud []*identity.Record
		for _, a := range acks {
			r := records[a.record.NodeID]
			if r == nil {
				continue
			}
			r.NoticeAcked = max(r.NoticeAcked, a.record.Notice)
			if a.fence > r.FenceEpoch {
				// Lifecycle has a later fence than recovery: the fence of this decision must be raised above it to be applied.
				r.FenceEpoch = int64(ids.NextWithEra(ids.Fence(a.fence), m.Era))
				r.Notice++
				loud = append(loud, r)
				continue
			}
			r.FenceAcked = max(r.FenceAcked, a.record.FenceEpoch)
			quiet = append(quiet, r)
		}
		if _, err := identity.SaveQuietly(ctx, tx, quiet...); err != nil {
			return err
		}
		_, err = identity.Save(ctx, tx, loud...)
		return err
	})
	if err != nil {
		return fmt.Errorf("record acknowledgements: %w", err)
	}
	t.deps.Wake.Notify()
	return nil
}
