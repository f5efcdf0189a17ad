package keys

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/aside"
	"github.com/gpuaas/mesh/internal/audit"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/keyset"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/rpc"
	"github.com/gpuaas/mesh/services/recovery/rollback"
)

// Deps are the dependencies of a Server.
type Deps struct {
	Logger *slog.Logger
	Pool   *pgxpool.Pool
	Wake   *events.Signal // notified after commits that appended events
	Audit  *audit.Log     // records refusals; nil: none are recorded
}

// Server implements KeyService. Safe for concurrent use.
type Server struct{ deps Deps }

// NewServer checks the dependencies.
func NewServer(deps Deps) (*Server, error) {
	if deps.Logger == nil || deps.Pool == nil {
		return nil, errors.New("key server needs a logger and a pool")
	}
	return &Server{deps: deps}, nil
}

// ListKeys returns the keys and which replica has which of them.
func (s *Server) ListKeys(ctx context.Context, _ *recoveryv1.ListKeysRequest) (*recoveryv1.ListKeysResponse, error) {
	var rows []keyset.Key
	var holders []keyset.Holder
	err := pg.InTx(ctx, s.deps.Pool, func(ctx context.Context, tx pgx.Tx) error {
		var err error
		if rows, err = keyset.ReadKeys(ctx, tx); err != nil {
			return err
		}
		holders, err = keyset.Holders(ctx, tx)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list keys: %w", pg.Fault(err))
	}
	out := &recoveryv1.ListKeysResponse{}
	for _, row := range rows {
		// A kind or state that this build does not know is reported by package aside, and shown as unspecified.
		kind, errKind := names.Parse[recoveryv1.KeyKind](string(row.Kind))
		state, errState := names.Parse[recoveryv1.KeyState](row.State)
		aside.Note(ctx, "key", row.KeyID, cmp.Or(errKind, errState))
		key := &recoveryv1.SigningKey{
			Kind: kind, KeyId: row.KeyID, State: state, Since: timestamppb.New(row.StateAt), MadeAt: timestamppb.New(row.MadeAt),
			File:     row.File,
			NeededBy: row.NeededBy,
		}
		for _, h := range holders {
			if h.Holds[row.KeyID] {
				key.HeldBy = append(key.HeldBy, h.Service+" "+h.ReplicaID)
			}
		}
		out.Keys = append(out.Keys, key)
	}
	for _, h := range holders {
		for _, problem := range h.Problems {
			out.Problems = append(out.Problems,
				&recoveryv1.KeyProblem{Service: h.Service, ReplicaId: h.ReplicaID, Problem: problem})
		}
	}
	return out, nil
}

// RotateKey records a request for the next key of a kind.
func (s *Server) RotateKey(ctx context.Context, req *recoveryv1.RotateKeyRequest) (*recoveryv1.RotateKeyResponse,
	error,
) {
	kind := keyset.Kind(names.Of(req.GetKind()))
	by, reason := rpc.ActorFrom(ctx), strings.TrimSpace(req.GetReason())
	entry := audit.Entry{
		Action: "key.rotate", SubjectType: "key", SubjectID: string(kind),
		Details: map[string]any{"dry_run": req.GetDryRun()},
	}
	if reason == "" {
		return nil, s.deps.Audit.Refuse(ctx, entry, fault.New(commonv1.Reason_REASON_REASON_REQUIRED, ""))
	}
	out := &recoveryv1.RotateKeyResponse{Kind: req.GetKind()}
	err := pg.InTx(ctx, s.deps.Pool, func(ctx context.Context, tx pgx.Tx) error {
		if err := rollback.Refuse(ctx, tx); err != nil {
			return err
		}
		if req.GetDryRun() {
			return keyset.Check(ctx, tx, kind)
		}
		asked, fresh, err := keyset.Ask(ctx, tx,
			keyset.Request{Kind: kind, IdempotencyKey: req.GetIdempotencyKey(), By: by, Reason: reason})
		if err != nil {
			return err
		}
		out.RotationId, out.KeyId, out.RequestedAt = asked.ID, asked.KeyID, timestamppb.New(asked.RequestedAt)
		if !fresh {
			return nil
		}
		done := entry
		done.Actor, done.Reason = by, reason
		out.Pos, err = audit.Record(ctx, tx, done)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("rotate key: %w", s.deps.Audit.Refuse(ctx, entry, pg.Fault(err)))
	}
	s.deps.Wake.Notify()
	if !req.GetDryRun() {
		s.deps.Logger.InfoContext(ctx, "a new key was asked for", slog.String("kind", string(kind)), slog.String("by", by))
	}
	return out, nil
}
