package operation

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/aside"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
	"github.com/gpuaas/mesh/services/lifecycle/workspace"
)

var operationKey = pg.Define(pg.RoleLifecycle, "operation.operation_key",
	`SELECT `+pg.Columns[keptOperation]("k")+` FROM lifecycle.operation_key k WHERE k.tenant_id = $1 AND k.key = $2`)

// keptOperation is the request that an idempotency key was used for, and the operation that was returned for it. A key
// of an earlier build has the run alone.
type keptOperation struct {
	Digest      string `db:"digest"`
	RunID       string `db:"run_id" expr:"@.run_id::text"`
	WorkspaceID string `db:"workspace_id" expr:"coalesce(@.workspace_id::text, '')"`
	Kind        string `db:"kind" expr:"coalesce(@.kind, '')"`
	Epoch       int64  `db:"epoch" expr:"coalesce(@.epoch, 0)"`
	RunKept     bool   `db:"run_kept" expr:"EXISTS (SELECT FROM lifecycle.saga_run r WHERE r.id = @.run_id)"`
}

// replay returns the operation that was returned for an idempotency key before; same reports whether that was for this
// request.
func (s *Server) replay(
	ctx context.Context, q pg.Querier, tenantID, key string, same func(was string) (bool, error),
) (*lifecyclev1.Operation, bool, error) {
	if key == "" {
		return nil, false, nil
	}
	kept, err := pg.One[keptOperation](ctx, q, operationKey, tenantID, key)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, false, nil
	}
	if err != nil {
		return nil, false, fmt.Errorf("read operation key: %w", err)
	}
	if ok, err := same(kept.Digest); err != nil {
		return nil, false, err
	} else if !ok {
		return nil, false, fault.New(commonv1.Reason_REASON_IDEMPOTENCY_KEY_REUSED,
			"this idempotency key was used for another request", fault.Conflicting(kept.RunID))
	}
	if !kept.RunKept {
		op, err := kept.answer(ctx, q)
		return op, err == nil, err
	}
	run, err := runs.Get(ctx, q, kept.RunID)
	if err != nil {
		return nil, false, err
	}
	ws, err := workspace.Get(ctx, q, run.WorkspaceID)
	if err != nil {
		return nil, false, err
	}
	op := joined(ws, run)
	op.Joined, op.Replayed = false, true
	return op, true, nil
}

// answer returns the operation of a key whose run has been cut: with the present state of the workspace, or as
// decommissioned if the workspace has been cut as well.
func (k keptOperation) answer(ctx context.Context, q pg.Querier) (*lifecyclev1.Operation, error) {
	kind := aside.Value[commonv1.OperationKind]("operation_key", k.RunID, k.Kind) // empty in a key of an earlier build
	op := &lifecyclev1.Operation{
		OperationId: k.RunID, WorkspaceId: k.WorkspaceID, Kind: kind, Epoch: k.Epoch, Replayed: true,
		State: commonv1.WorkspaceState_WORKSPACE_STATE_DECOMMISSIONED,
	}
	if k.WorkspaceID == "" {
		return op, nil
	}
	ws, err := workspace.Get(ctx, q, k.WorkspaceID)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return op, nil
	case err != nil:
		return nil, err
	}
	op.State = ws.WorkspaceState()
	return op, nil
}

var lockOperationKey = pg.Define(pg.RoleLifecycle, "operation.lock_operation_key",
	`SELECT pg_advisory_xact_lock(hashtextextended($1, 1))`)

// lockKey serializes requests that use one key at the same time, so that the second finds the operation that the first
// got. It is taken before every other lock.
func lockKey(ctx context.Context, tx pgx.Tx, tenantID, key string) error {
	if key == "" {
		return nil
	}
	if _, err := pg.Exec(ctx, tx, lockOperationKey, tenantID+"/"+key); err != nil {
		return fmt.Errorf("lock operation key: %w", err)
	}
	return nil
}

var insertOperationKey = pg.Define(pg.RoleLifecycle, "operation.insert_operation_key",
	`INSERT INTO lifecycle.operation_key (tenant_id, key, digest, run_id, workspace_id, kind, epoch)
		SELECT $1, $2, $3, r.id, r.workspace_id, r.kind, r.epoch FROM lifecycle.saga_run r WHERE r.id = $4`)

// keepKey stores the operation that was returned for a key, for retention.operation_keys_seconds and until its run has
// ended.
func keepKey(ctx context.Context, tx pgx.Tx, tenantID, key, digest, runID string) error {
	_, err := pg.Exec(ctx, tx, insertOperationKey, tenantID, key, digest, runID)
	if err != nil {
		return fmt.Errorf("keep operation key: %w", err)
	}
	return nil
}

// replayCreate is replay for a create, whose spec is compared by its digest under the key that made the stored one.
func (s *Server) replayCreate(ctx context.Context, q pg.Querier, w createRequest, key string) (*lifecyclev1.Operation,
	bool, error,
) {
	return s.replay(ctx, q, w.tenant.ID, key, func(was string) (bool, error) {
		name, digest, _ := strings.Cut(was, "/")
		if name != w.name {
			return false, nil
		}
		return s.deps.Secrets.Matches(digest, w.sum)
	})
}

// keyDigest returns the digest that a create's idempotency key is stored with.
func (s *Server) keyDigest(w createRequest) (string, error) {
	digest, err := s.deps.Secrets.Digest(w.sum)
	return w.name + "/" + digest, err
}

// keyOf returns the text that identifies the request that an idempotency key is used for.
func keyOf(req *lifecyclev1.RequestOperationRequest, workspaceID string) string {
	out := names.Of(req.GetKind()) + "/" + workspaceID
	if req.GetFencedProof() != noProof {
		out += "/" + names.Of(req.GetFencedProof())
	}
	return out
}
