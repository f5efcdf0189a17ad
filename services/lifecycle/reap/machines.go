package reap

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"google.golang.org/protobuf/proto"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/audit"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/allocation"
	"github.com/gpuaas/mesh/services/lifecycle/claims"
	"github.com/gpuaas/mesh/services/lifecycle/gate"
	"github.com/gpuaas/mesh/services/lifecycle/placement"
	"github.com/gpuaas/mesh/services/lifecycle/rollback"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
	"github.com/gpuaas/mesh/services/lifecycle/task"
	"github.com/gpuaas/mesh/services/lifecycle/task/dispatch"
	"github.com/gpuaas/mesh/services/lifecycle/workspace"
)

// MachineReaperDeps are the dependencies of a MachineReaper.
type MachineReaperDeps struct {
	Logger    *slog.Logger
	DB        *pgxpool.Pool
	Tasks     *dispatch.Server
	Committed func()
}

// MachineReaper has the agents of machines remove what releases have left behind there, once those machines answer
// again. It queues typed tasks while no operation on the workspace is open, and never for a resource that a claim of a
// later epoch is for.
type MachineReaper struct {
	deps MachineReaperDeps

	mu sync.Mutex
	// after is the last orphan of the batch before; zero at the beginning.
	after onMachine
}

// NewMachineReaper returns a reaper with the given dependencies.
func NewMachineReaper(deps MachineReaperDeps) *MachineReaper { return &MachineReaper{deps: deps} }

// leftBehind is an orphan on a machine that answers.
type leftBehind struct {
	ClaimID     string `db:"claim_id"`
	Kind        string `db:"kind"`
	Name        string `db:"name"`
	WorkspaceID string `db:"workspace_id"`
	TenantID    string `db:"tenant_id"`
	NodeID      string `db:"node_id"`
	Epoch       int64  `db:"epoch"`
	KeyPrefix   string `db:"key_prefix"` // of its tasks' keys, before the minute
	Key         string `db:"key"`        // of a task of this minute
}

// onMachine is an orphan with its place in the order of sweeps.
type onMachine struct {
	leftBehind

	OrphanedAt time.Time `db:"orphaned_at"`
}

// ReapBatch is how many orphans one sweep takes.
const ReapBatch = 200

var orphansOnMachines = pg.Define(pg.RoleLifecycle, "reap.orphans_on_machines", `
		SELECT c.id::text AS claim_id, c.kind, c.deterministic_name AS name, c.workspace_id::text AS workspace_id,
			c.tenant_id::text AS tenant_id, c.node_id::text AS node_id, c.epoch,
			'reap/' || c.id || '/' || g.session_epoch || '/' AS key_prefix,
			'reap/' || c.id || '/' || g.session_epoch || '/' || floor(extract(epoch FROM mesh.clock()) / 60)::bigint AS key,
				c.orphaned_at
		FROM lifecycle.resource_claim c JOIN lifecycle.node_gate g ON g.node_id = c.node_id
		WHERE c.orphaned_at IS NOT NULL AND c.released_at IS NULL AND c.kind = ANY ($1) AND g.admitted
			AND g.instance_id IS NULL AND `+gate.ConnectedSQL+`
			-- While a run is open, its own commands are the latest.
			AND NOT EXISTS (SELECT 1 FROM lifecycle.saga_run r WHERE r.workspace_id = c.workspace_id
				AND r.state IN ('pending', 'running', 'waiting', 'compensating', 'stuck'))
			AND (c.orphaned_at, c.id) > ($3::timestamptz, coalesce(nullif($4, ''), '00000000-0000-0000-0000-000000000000')::uuid)
		ORDER BY c.orphaned_at, c.id LIMIT $2`)

// Sweep queues a task for each orphan of a batch, again once the task before has failed and at most once a minute, and
// releases the orphans that are confirmed gone. It returns how many it released. It makes allocations release_failed
// whose releases are long late and that no driver brings to an end.
func (r *MachineReaper) Sweep(ctx context.Context) (int, error) {
	switch late, err := allocation.FailLate(ctx, r.deps.DB); {
	case err != nil:
		return 0, err
	case late > 0:
		r.deps.Committed()
		r.deps.Logger.WarnContext(ctx, "releases are long past their deadlines and count as failed",
			slog.Int("allocations", late))
	}
	list, err := r.nextBatch(ctx)
	if err != nil {
		return 0, fmt.Errorf("list orphans on machines: %w", err)
	}
	released := 0
	var errs []error
	for _, l := range list {
		gone, err := r.reap(ctx, l.leftBehind)
		if err != nil {
			errs = append(errs, fmt.Errorf("reap %s %s of %s: %w", l.Kind, l.Name, l.WorkspaceID, err))
			continue
		}
		if gone {
			released++
			r.deps.Logger.InfoContext(ctx, "orphan on a machine is gone", slog.String(obs.KeyWorkspaceID, l.WorkspaceID),
				slog.String(obs.KeyNodeID, l.NodeID), slog.Int64("epoch", l.Epoch), slog.String("kind", l.Kind),
				slog.String("name", l.Name))
		}
	}
	return released, errors.Join(errs...)
}

// nextBatch returns the batch after the one before, and the first batch once the last one was reached: orphans
// that stay do not keep others from being reaped.
func (r *MachineReaper) nextBatch(ctx context.Context) ([]onMachine, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	list, err := pg.All[onMachine](ctx, r.deps.DB, orphansOnMachines,
		[]string{allocation.KindWorkload, allocation.KindStorage}, ReapBatch,
		r.after.OrphanedAt, r.after.ClaimID)
	if err != nil {
		return nil, err
	}
	r.after = onMachine{}
	if len(list) == ReapBatch {
		r.after = list[len(list)-1]
	}
	return list, nil
}

// reap releases an orphan whose last task of this session succeeded, however long ago, and queues another after one
// that failed. Workloads go before the storage that they stand on.
func (r *MachineReaper) reap(ctx context.Context, l leftBehind) (bool, error) {
	gone, queued := false, false
	err := pg.InTx(ctx, r.deps.DB, func(ctx context.Context, tx pgx.Tx) error {
		gone, queued = false, false
		free, replaced, err := l.inspect(ctx, tx)
		if err != nil || !free {
			return err
		}
		why := WhyReplaced
		if !replaced {
			last, found, err := task.LastNumbered(ctx, tx, l.KeyPrefix)
			if err != nil {
				return err
			}
			if last.State != commonv1.TaskState_TASK_STATE_SUCCEEDED {
				if found && (last.IdemKey == l.Key || !task.Terminal(last.State) && !l.late(last)) {
					return nil
				}
				queued, err = r.enqueue(ctx, tx, l)
				return err
			}
			why = "the agent has removed it"
		}
		gone = true
		return l.forget(ctx, tx, why)
	})
	if err != nil {
		return false, err
	}
	r.deps.Committed()
	if queued {
		r.deps.Tasks.Notify(l.NodeID)
	}
	return gone, nil
}

// ReapLate is the number of minutes after which a task that has not ended is taken for lost: an agent gives up a task
// after half an hour.
const ReapLate = 35

// late reports whether a task of the orphan was queued at least ReapLate minutes ago. Nothing else ends a task that an
// agent has taken while the agent's session stands.
func (l leftBehind) late(last task.Row) bool {
	queued, err := strconv.ParseInt(strings.TrimPrefix(last.IdemKey, l.KeyPrefix), 10, 64)
	now, nowErr := strconv.ParseInt(strings.TrimPrefix(l.Key, l.KeyPrefix), 10, 64)
	return err != nil || nowErr != nil || now-queued >= ReapLate
}

// WhyReplaced is the recorded evidence that nothing of an orphan is left, where a later claim is for the same resource.
const WhyReplaced = "a later epoch has taken its place"

// replacedSQL is the condition, over an orphan c, that a later claim is for the same resource.
const replacedSQL = `EXISTS (SELECT 1 FROM lifecycle.resource_claim l
	WHERE l.workspace_id = c.workspace_id AND l.kind = c.kind
				AND l.node_id IS NOT DISTINCT FROM c.node_id AND l.deterministic_name = c.deterministic_name AND l.id <> c.id
					AND l.released_at IS NULL
				AND (l.orphaned_at IS NULL OR l.epoch > c.epoch OR l.epoch = c.epoch AND l.id > c.id))`

var orphanStands = pg.Define(pg.RoleLifecycle, "reap.orphan_stands", `
		SELECT c.orphaned_at IS NOT NULL AND c.released_at IS NULL AS orphaned, `+replacedSQL+` AS replaced
		FROM lifecycle.resource_claim c WHERE c.id = $1`)

// inspect locks the workspace of an orphan and checks it once more: free reports that it is still given up, that no
// operation is open and that rollback mode is not set, replaced that a later claim of the same name, on the same
// machine if it is on one, is for the same resource. An operation that begins meanwhile is committed either before the
// lock, and is found, or after it.
//
//nolint:nonamedreturns // two answers of a kind
func (l leftBehind) inspect(ctx context.Context, tx pgx.Tx) (free, replaced bool, err error) {
	if still, err := rollback.Active(ctx, tx); err != nil || still {
		return false, false, err
	}
	if err := gate.LockOfWorkspace(ctx, tx, l.WorkspaceID); err != nil { // the end of the orphan may end a cordon
		return false, false, err
	}
	if _, err := pg.Exec(ctx, tx, allocation.LockWorkspace, l.WorkspaceID); err != nil {
		return false, false, fmt.Errorf("lock workspace: %w", err)
	}
	if _, open, err := runs.Live(ctx, tx, l.WorkspaceID); err != nil || open {
		return false, false, err
	}
	now, err := pg.One[struct {
		Orphaned bool `db:"orphaned"`
		Replaced bool `db:"replaced"`
	}](ctx, tx, orphanStands, l.ClaimID)
	if err != nil {
		return false, false, fmt.Errorf("read orphan: %w", err)
	}
	return now.Orphaned, now.Replaced, nil
}

var workloadsLeft = pg.Define(pg.RoleLifecycle, "reap.workloads_left",
	`SELECT EXISTS (SELECT 1 FROM lifecycle.resource_claim c WHERE c.workspace_id = $1 AND c.node_id = $2 AND c.kind = $3
			AND c.epoch = $4 AND c.orphaned_at IS NOT NULL AND c.released_at IS NULL)`)

// numbers are what an agent and a schema compare: those of the workspace now.
type numbers struct {
	Epoch int64 `db:"epoch"`
	OpSeq int64 `db:"op_seq"`
}

var drawOpSeq = pg.Define(pg.RoleLifecycle, "reap.draw_op_seq",
	`UPDATE lifecycle.workspace SET op_seq = mesh.next(op_seq), version = version + 1 WHERE id = $1
		RETURNING op_seq, epoch`)

// enqueue queues a task for an orphan. It returns false where the storage has to wait for its workload.
func (r *MachineReaper) enqueue(ctx context.Context, tx pgx.Tx, l leftBehind) (bool, error) {
	if l.Kind == allocation.KindStorage {
		standing, err := pg.Value[bool](ctx, tx, workloadsLeft, l.WorkspaceID, l.NodeID, allocation.KindWorkload, l.Epoch)
		if err != nil || standing {
			return false, err
		}
	}
	// The op_seq is above that of every earlier task of this workspace, so that the agent takes this task for the newest.
	// Nothing of a later epoch has this name on this machine, so the task may have the newest epoch: an agent that has
	// seen that epoch would refuse an older one.
	drawn, err := pg.One[numbers](ctx, tx, drawOpSeq, l.WorkspaceID)
	if err != nil {
		return false, fmt.Errorf("draw number of operation: %w", err)
	}
	if _, _, err := workspace.Announce(ctx, tx, l.WorkspaceID); err != nil {
		return false, err
	}
	kind, payload := commonv1.TaskType_TASK_TYPE_WORKLOAD_REMOVE, proto.Message(&nodev1.WorkloadRef{Name: l.Name})
	if l.Kind == allocation.KindStorage {
		kind, payload = commonv1.TaskType_TASK_TYPE_STORAGE_RELEASE, &nodev1.StorageRelease{Name: l.Name}
	}
	_, err = task.Enqueue(ctx, tx, task.Spec{
		Type: kind, NodeID: l.NodeID, WorkspaceID: l.WorkspaceID, TenantID: l.TenantID, Epoch: drawn.Epoch,
		OpSeq:          drawn.OpSeq,
		IdempotencyKey: l.Key, Payload: payload, CreatedBy: "reaper",
	})
	return err == nil, err
}

// forget releases the claim of an orphan that is gone, and what was kept because of it: the allocation, and the
// machine's cordon.
func (l leftBehind) forget(ctx context.Context, tx pgx.Tx, why string) error {
	if err := claims.ReleaseOrphan(ctx, tx, l.ClaimID, why); err != nil {
		return err
	}
	if err := allocation.AnnounceOrphans(ctx, tx, l.WorkspaceID, l.Epoch); err != nil {
		return err
	}
	_, err := audit.Record(ctx, tx, audit.Entry{
		Action: "workspace.orphan.reap", Reason: why, SubjectType: "claim", SubjectID: l.ClaimID, TenantID: l.TenantID,
		WorkspaceID: l.WorkspaceID, NodeID: l.NodeID,
		Details: map[string]any{"epoch": l.Epoch, "kind": l.Kind, "name": l.Name},
	})
	if err != nil {
		return err
	}
	if err := freeCleaned(ctx, tx, placement.Instance{WorkspaceID: l.WorkspaceID, Epoch: l.Epoch}); err != nil ||
		l.NodeID == "" {
		return err
	}
	return allocation.UncordonIfClean(ctx, tx, l.NodeID)
}
