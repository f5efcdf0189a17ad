package rollback

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/audit"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/rpc"
)

// SyncEvery is how often a replica checks for a mode that the schema's owner has declared.
const SyncEvery = 10 * time.Second

// Deps are the dependencies of a Server.
type Deps struct {
	Logger *slog.Logger
	Pool   *pgxpool.Pool
	Wake   *events.Signal // notified after commits that appended events
	Audit  *audit.Log     // records refusals; nil: none are recorded
}

// Server implements RollbackService. Safe for concurrent use; any number of replicas share the row.
type Server struct{ deps Deps }

// New checks the dependencies.
func New(deps Deps) (*Server, error) {
	if deps.Logger == nil || deps.Pool == nil {
		return nil, errors.New("rollback server needs a logger and a pool")
	}
	return &Server{deps: deps}, nil
}

// GetRollback returns the present mode.
func (s *Server) GetRollback(
	ctx context.Context, _ *recoveryv1.GetRollbackRequest,
) (*recoveryv1.GetRollbackResponse, error) {
	mode, err := Read(ctx, s.deps.Pool)
	if err != nil {
		return nil, err
	}
	return &recoveryv1.GetRollbackResponse{Rollback: mode.Proto()}, nil
}

// ReportRollback records the evidence that lifecycle reports from a launch log.
func (s *Server) ReportRollback(
	ctx context.Context, req *recoveryv1.ReportRollbackRequest,
) (*recoveryv1.ReportRollbackResponse, error) {
	e := Evidence{
		Kind: req.GetKind(), Subject: req.GetSubject(), Detail: strings.TrimSpace(req.GetDetail()),
		Remembered: req.GetRemembered(), Known: req.GetKnown(),
		Era: EraOf(req.GetRemembered()),
	}
	switch req.GetKind() {
	case launchLogAhead:
	case launchLogBehind:
		// Here the log is older than the database: the numbers that could be given twice are those that the database has.
		e.Era = EraOf(req.GetKnown())
	default:
		return nil, fault.New(commonv1.Reason_REASON_INVALID_ARGUMENT, "a report is about a launch log",
			fault.Unmet("kind: launch_log_ahead or launch_log_behind"))
	}
	var mode *Mode
	var set bool
	err := pg.InTx(ctx, s.deps.Pool, func(ctx context.Context, tx pgx.Tx) error {
		var err error
		mode, set, err = Record(ctx, tx, e)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("report rollback: %w", err)
	}
	s.deps.Wake.Notify()
	if set {
		Log(ctx, s.deps.Logger, mode)
	}
	return &recoveryv1.ReportRollbackResponse{Rollback: mode.Proto()}, nil
}

// AcceptRollback ends the mode on a person's decision.
func (s *Server) AcceptRollback(
	ctx context.Context, req *recoveryv1.AcceptRollbackRequest,
) (*recoveryv1.AcceptRollbackResponse, error) {
	out := &recoveryv1.AcceptRollbackResponse{}
	by, reason := rpc.ActorFrom(ctx), strings.TrimSpace(req.GetReason())
	refused := audit.Entry{Action: "rollback.accept", SubjectType: "rollback", SubjectID: subject}
	if reason == "" {
		empty := fault.New(commonv1.Reason_REASON_REASON_REQUIRED, "")
		return nil, s.deps.Audit.Refuse(ctx, refused, empty)
	}
	err := pg.InTx(ctx, s.deps.Pool, func(ctx context.Context, tx pgx.Tx) error {
		mode, err := lock(ctx, tx)
		if err != nil {
			return err
		}
		if !mode.Active {
			return fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED, "rollback mode is not active",
				fault.Unmet("no rollback mode is there to accept"),
				fault.Remedy("nothing is to be done: the mesh is at work"))
		}
		if out.Pos, err = accept(ctx, tx, mode, by, reason); err != nil {
			return err
		}
		out.Rollback = mode.Proto()
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("accept rollback: %w", s.deps.Audit.Refuse(ctx, refused, err))
	}
	s.deps.Wake.Notify()
	s.deps.Logger.WarnContext(ctx, "rollback mode has ended: it was accepted",
		slog.String("by", by), slog.String("reason", reason),
		slog.Int64("era", out.GetRollback().GetEra()))
	return out, nil
}

// Sync opens the incident of a mode that the schema's owner declared, since the owner cannot append events.
func (s *Server) Sync(ctx context.Context) error {
	opened := false
	err := pg.InTx(ctx, s.deps.Pool, func(ctx context.Context, tx pgx.Tx) error {
		opened = false
		mode, err := Read(ctx, tx)
		if err != nil || !mode.Active || mode.IncidentID != "" {
			return err
		}
		if mode, err = lock(ctx, tx); err != nil || !mode.Active || mode.IncidentID != "" {
			return err
		}
		now, err := pg.Value[time.Time](ctx, tx, readClock)
		if err != nil {
			return fmt.Errorf("read clock: %w", err)
		}
		if err := report(ctx, tx, mode, now); err != nil {
			return err
		}
		opened = true
		return mode.save(ctx, tx)
	})
	if err != nil {
		return fmt.Errorf("open incident of a declared restore: %w", err)
	}
	if opened {
		s.deps.Wake.Notify()
		s.deps.Logger.ErrorContext(ctx, "the database was restored: rollback mode is active",
			slog.String("next_action", NextAction))
	}
	return nil
}

// Run calls Sync until ctx ends.
func (s *Server) Run(ctx context.Context) error {
	return app.Every(ctx, s.deps.Logger, "rollback", SyncEvery, s.Sync)
}

// Log logs that the mode was set on evidence. It must be called after the commit.
func Log(ctx context.Context, logger *slog.Logger, mode *Mode) {
	first := mode.evidence[0]
	logger.ErrorContext(ctx, "the database is older than what others remember: rollback mode is active",
		slog.String("evidence", first.Kind), slog.String("subject", first.Subject), slog.String("detail", first.Detail),
		slog.String(obs.KeyReason, names.Of(reasonRollback)),
		slog.String("next_action", NextAction))
}
