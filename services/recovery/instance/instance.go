package instance

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/config"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/failpoint"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/recovery/identity"
	"github.com/gpuaas/mesh/services/recovery/rollback"
)

// Config bounds instances; zero fields take the defaults.
type Config struct {
	// LaunchSecretLife is how long an instance may take to register: 24 h.
	LaunchSecretLife time.Duration
}

var defaults = Config{LaunchSecretLife: 24 * time.Hour}

// Deps are the dependencies of Instances.
type Deps struct {
	Logger *slog.Logger
	Pool   *pgxpool.Pool
	// Wake, Changed and Notices are notified as described at identity.Deps.
	Wake, Changed, Notices *events.Signal
}

// Instances prepares instances, and retires them. Safe for concurrent use; any number of replicas share the database.
type Instances struct {
	deps Deps
	cfg  Config
}

// New checks the dependencies; it does not touch the database.
func New(deps Deps, cfg Config) (*Instances, error) {
	if deps.Logger == nil || deps.Pool == nil {
		return nil, errors.New("instances need a logger and a pool")
	}
	return &Instances{deps: deps, cfg: config.Or(cfg, defaults)}, nil
}

func (s *Instances) committed() {
	s.deps.Wake.Notify()
	s.deps.Changed.Notify()
	s.deps.Notices.Notify()
}

// Prepare records the hash of a launch secret and returns the id of the node that the instance will be. It is
// idempotent by instance: a repetition may carry a new secret as long as the old one was not used.
func (s *Instances) Prepare(ctx context.Context, req *recoveryv1.PrepareInstanceRequest) (string, error) {
	var nodeID string
	err := pg.InTx(ctx, s.deps.Pool, func(ctx context.Context, tx pgx.Tx) error {
		var err error
		if nodeID, err = s.prepare(ctx, tx, req); err != nil {
			return err
		}
		return failpoint.Hit("recovery.prepare_instance.before_commit")
	})
	if err != nil {
		return "", fmt.Errorf("prepare instance: %w", err)
	}
	s.committed()
	if err := failpoint.Hit("recovery.prepare_instance.after_commit"); err != nil {
		return "", err
	}
	return nodeID, nil
}

func (s *Instances) prepare(ctx context.Context, tx pgx.Tx, req *recoveryv1.PrepareInstanceRequest) (string, error) {
	if err := rollback.Refuse(ctx, tx); err != nil {
		return "", err
	}
	highest, holder, err := lockEpoch(ctx, tx, req.GetWorkspaceId(), req.GetEpoch(), req.GetInstanceId())
	if err != nil {
		return "", err
	}
	known, err := pg.One[row](ctx, tx, lockInstance, req.GetInstanceId())
	switch {
	case pg.IsNoRows(err):
	case err != nil:
		return "", fmt.Errorf("read instance: %w", err)
	case known.WorkspaceID != req.GetWorkspaceId() || known.Epoch != req.GetEpoch():
		return "", fault.New(commonv1.Reason_REASON_CONFLICT, "the instance belongs to another workspace or epoch",
			fault.WithAction(commonv1.Action_ACTION_STOP))
	case known.Retired:
		return "", fault.New(commonv1.Reason_REASON_EPOCH_ENDED, "the instance has been retired")
	case known.Epoch < highest:
		return "", fault.New(commonv1.Reason_REASON_EPOCH_SUPERSEDED, "")
	default:
		return known.NodeID, s.renewSecret(ctx, tx, req)
	}
	if req.GetEpoch() < highest {
		return "", fault.New(commonv1.Reason_REASON_EPOCH_SUPERSEDED, "")
	}
	if holder != req.GetInstanceId() {
		if err := takeOver(ctx, tx, req, holder); err != nil {
			return "", err
		}
	}
	name, err := freeName(ctx, tx, req)
	if err != nil {
		return "", err
	}
	r := &identity.Record{
		NodeID: ids.New(), Name: name, StateBy: "lifecycle", StateReason: "prepared for an instance",
		WorkspaceID: req.GetWorkspaceId(), TenantID: req.GetTenantId(), Epoch: req.GetEpoch(),
		LaunchedInstanceID: req.GetInstanceId(),
	}
	if _, err := identity.Insert(ctx, tx, r); err != nil {
		if pg.IsUnique(err, "identity_name") {
			return "", fault.New(commonv1.Reason_REASON_CONFLICT, "a node of that name was made meanwhile", fault.Cause(err))
		}
		return "", err
	}
	_, err = pg.Exec(ctx, tx, insertInstance, req.GetInstanceId(), req.GetWorkspaceId(), req.GetEpoch(), r.NodeID)
	if err != nil {
		return "", fmt.Errorf("insert instance: %w", err)
	}
	_, err = pg.Exec(ctx, tx, insertLaunch, req.GetInstanceId(), r.NodeID, req.GetSecretSha256(),
		s.cfg.LaunchSecretLife.Seconds())
	if err != nil {
		return "", fmt.Errorf("insert launch secret: %w", err)
	}
	return r.NodeID, nil
}

// lockEpoch raises the workspace's highest epoch to the requested one if that is higher. It locks the row, and returns
// the highest epoch and its instance.
func lockEpoch(ctx context.Context, tx pgx.Tx, workspaceID string, epoch int64, instanceID string) (int64, string,
	error,
) {
	if _, err := pg.Exec(ctx, tx, raiseEpoch, workspaceID, epoch, instanceID); err != nil {
		return 0, "", fmt.Errorf("raise epoch of workspace: %w", err)
	}
	highest, err := pg.One[Epoch](ctx, tx, lockWorkspaceEpoch, workspaceID)
	if err != nil {
		return 0, "", fmt.Errorf("lock epoch of workspace: %w", err)
	}
	return highest.Number, highest.InstanceID, nil
}

// renewSecret handles a repeated preparation: the same secret changes nothing, another one replaces a secret that was
// never used.
func (s *Instances) renewSecret(ctx context.Context, tx pgx.Tx, req *recoveryv1.PrepareInstanceRequest) error {
	tag, err := pg.Exec(ctx, tx, renewLaunch, req.GetInstanceId(), req.GetSecretSha256(), s.cfg.LaunchSecretLife.Seconds())
	if err != nil {
		return fmt.Errorf("replace launch secret: %w", err)
	}
	if tag.RowsAffected() != 1 {
		return fault.New(commonv1.Reason_REASON_CONFLICT, "the instance has registered with another secret already",
			fault.WithAction(commonv1.Action_ACTION_STOP))
	}
	return nil
}

// takeOver lets another instance of the same epoch be prepared, if the first one ended or never registered.
func takeOver(ctx context.Context, tx pgx.Tx, req *recoveryv1.PrepareInstanceRequest, holder string) error {
	used, err := pg.Value[bool](ctx, tx, isRegistered, holder)
	if err != nil && !pg.IsNoRows(err) {
		return fmt.Errorf("read present instance: %w", err)
	}
	if used {
		return fault.New(commonv1.Reason_REASON_CONFLICT, "another instance of this epoch is registered",
			fault.Conflicting(holder),
			fault.WithAction(commonv1.Action_ACTION_STOP))
	}
	if _, err := pg.Exec(ctx, tx, revokeUnused, holder); err != nil {
		return fmt.Errorf("revoke launch secret: %w", err)
	}
	_, err = pg.Exec(ctx, tx, nameHolder, req.GetWorkspaceId(), req.GetInstanceId())
	if err != nil {
		return fmt.Errorf("name the epoch's instance: %w", err)
	}
	return nil
}

// freeName returns the requested name, made unique among the nodes that are not retired: an instance must not fail to
// start because its predecessor is not yet retired.
func freeName(ctx context.Context, tx pgx.Tx, req *recoveryv1.PrepareInstanceRequest) (string, error) {
	name := req.GetNodeName()
	if name == "" {
		name = "box-" + req.GetInstanceId()
	}
	taken, err := identity.GetByName(ctx, tx, name)
	if err != nil || taken == nil {
		return name, err
	}
	return name + "-" + req.GetInstanceId()[24:], nil
}

// Retire ends the identity of an instance that has ended. It is idempotent. For an unknown instance it leaves a
// tombstone, so that a preparation that comes late finds the instance ended. In rollback mode no identity is retired: a
// person has to find out first which instances have ended.
func (s *Instances) Retire(ctx context.Context, req *recoveryv1.RetireInstanceRequest) error {
	err := pg.InTx(ctx, s.deps.Pool, func(ctx context.Context, tx pgx.Tx) error {
		if err := rollback.Refuse(ctx, tx); err != nil {
			return err
		}
		nodeID, err := pg.Value[string](ctx, tx, endInstance, req.GetInstanceId(), req.GetWorkspaceId(), req.GetEpoch())
		if err != nil {
			return fmt.Errorf("end instance: %w", err)
		}
		if nodeID == "" {
			return nil
		}
		r, err := identity.LockOne(ctx, tx, nodeID)
		if err != nil {
			return err
		}
		if r.State == commonv1.NodeIdentityState_NODE_IDENTITY_STATE_RETIRED {
			return nil
		}
		m, err := identity.ReadMoment(ctx, tx)
		if err != nil {
			return err
		}
		reason := req.GetReason()
		if reason == "" {
			reason = "the instance has ended"
		}
		if err := identity.Retire(ctx, tx, r, "lifecycle", reason, m); err != nil {
			return err
		}
		if _, err := identity.Save(ctx, tx, r); err != nil {
			return err
		}
		return failpoint.Hit("recovery.retire_instance.before_commit")
	})
	if err != nil {
		return fmt.Errorf("retire instance: %w", err)
	}
	s.committed()
	s.deps.Logger.InfoContext(ctx, "instance retired", slog.String("instance_id", req.GetInstanceId()),
		slog.String(obs.KeyWorkspaceID, req.GetWorkspaceId()),
		slog.Int64("epoch", req.GetEpoch()), slog.Time("at", time.Now()))
	return nil
}
