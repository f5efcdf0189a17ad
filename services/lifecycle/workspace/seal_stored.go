package workspace

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/secretenv"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
)

// sealBatch bounds what is read at once.
const sealBatch = 200

// Sealer seals what builds before sealed values have stored: specs of workspaces and runs, and the digests of specs. It changes each row once, and finds
// nothing when it is run again.
type Sealer struct {
	DB        *pgxpool.Pool
	Secrets   *secretenv.Keys
	Committed func()
}

// Seal seals every row there is and returns how many it changed.
func (s *Sealer) Seal(ctx context.Context) (int, error) {
	total := 0
	for _, kind := range []struct {
		name, query string
		seal        func(ctx context.Context, id string) (bool, error)
	}{
		{"workspaces", `SELECT id::text FROM lifecycle.workspace WHERE id > $1::uuid
			AND (jsonb_path_exists(spec, '$.workloads[*].env.*') OR spec_digest ~ '^[0-9a-f]{64}$') ORDER BY id LIMIT $2`, s.workspace},
		{"runs", `SELECT id::text FROM lifecycle.saga_run WHERE id > $1::uuid AND jsonb_path_exists(input, '$.spec.workloads[*].env.*') ORDER BY id LIMIT $2`, s.run},
	} {
		n, err := s.each(ctx, kind.query, kind.seal)
		total += n
		if err != nil {
			return total, fmt.Errorf("seal stored %s: %w", kind.name, err)
		}
	}
	n, err := s.keys(ctx)
	if err != nil {
		return total, fmt.Errorf("seal stored idempotency keys: %w", err)
	}
	return total + n, nil
}

// each seals the rows that a query lists by id, in order.
func (s *Sealer) each(ctx context.Context, query string, seal func(context.Context, string) (bool, error)) (int, error) {
	total, last := 0, "00000000-0000-0000-0000-000000000000"
	for {
		rows, err := s.DB.Query(ctx, query, last, sealBatch)
		if err != nil {
			return total, fmt.Errorf("list: %w", err)
		}
		found, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if err != nil {
			return total, fmt.Errorf("list: %w", err)
		}
		for _, id := range found {
			changed, err := seal(ctx, id)
			if err != nil {
				return total, err
			}
			if changed {
				total++
			}
			last = id
		}
		if len(found) < sealBatch {
			return total, nil
		}
	}
}

// workspace seals one workspace's spec and digest, and announces the row: what follows the log gets the new digest by the event.
func (s *Sealer) workspace(ctx context.Context, id string) (bool, error) {
	changed := false
	err := pg.InTx(ctx, s.DB, func(ctx context.Context, tx pgx.Tx) error {
		changed = false
		var tenantID, digest string
		var raw json.RawMessage
		err := tx.QueryRow(ctx, `SELECT tenant_id::text, spec, spec_digest FROM lifecycle.workspace WHERE id = $1 FOR NO KEY UPDATE`, id).Scan(&tenantID, &raw, &digest)
		if errors.Is(err, pgx.ErrNoRows) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read workspace %s: %w", id, err)
		}
		sealed, plain, err := s.spec(raw, secretenv.Owner{TenantID: tenantID, WorkspaceID: id})
		if err != nil {
			return fmt.Errorf("workspace %s: %w", id, err)
		}
		sum, bare := secretenv.Bare(digest)
		if !plain && !bare {
			return nil // another replica was here
		}
		if bare {
			if digest, err = s.Secrets.Digest(sum); err != nil {
				return err //nolint:wrapcheck // it says what it did
			}
		}
		if _, err = tx.Exec(ctx, `UPDATE lifecycle.workspace SET seal = NULL, spec = $2, spec_digest = $3, version = version + 1 WHERE id = $1`, id, sealed, digest); err != nil {
			return fmt.Errorf("seal workspace %s: %w", id, err)
		}
		changed = true
		_, _, err = saga.AnnounceWorkspace(ctx, tx, id)
		return err //nolint:wrapcheck // it says what it did
	})
	if err == nil && changed {
		s.Committed()
	}
	return changed, err //nolint:wrapcheck // wrapped above
}

// run seals the spec in one run's input. No event has the input, so that the row's version stays.
func (s *Sealer) run(ctx context.Context, id string) (bool, error) {
	var owner secretenv.Owner
	var raw json.RawMessage
	err := s.DB.QueryRow(ctx, `SELECT tenant_id::text, workspace_id::text, input FROM lifecycle.saga_run WHERE id = $1`, id).Scan(&owner.TenantID, &owner.WorkspaceID, &raw)
	if errors.Is(err, pgx.ErrNoRows) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("read run %s: %w", id, err)
	}
	var in struct {
		Spec json.RawMessage `json:"spec"`
	}
	if err := json.Unmarshal(raw, &in); err != nil {
		return false, fmt.Errorf("read input of run %s: %w", id, err)
	}
	sealed, plain, err := s.spec(in.Spec, owner)
	if err != nil || !plain {
		return false, err
	}
	// Whatever else the input has stays. One that was amended meanwhile is read again by the next run of this.
	tag, err := s.DB.Exec(ctx, `UPDATE lifecycle.saga_run SET seal = NULL, input = jsonb_set(input, '{spec}', $2::jsonb) WHERE id = $1 AND input = $3::jsonb`,
		id, sealed, raw)
	if err != nil {
		return false, fmt.Errorf("seal input of run %s: %w", id, err)
	}
	return tag.RowsAffected() > 0, nil
}

// spec seals a stored spec. The bool is false if it had no value in the clear.
func (s *Sealer) spec(raw json.RawMessage, owner secretenv.Owner) (json.RawMessage, bool, error) {
	spec := &lifecyclev1.WorkspaceSpec{}
	if err := names.UnmarshalInto(raw, spec); err != nil {
		return nil, false, fmt.Errorf("read spec: %w", err)
	}
	if !secretenv.Clear(spec) {
		return raw, false, nil
	}
	spec, err := s.Secrets.Seal(spec, owner)
	if err != nil {
		return nil, false, err //nolint:wrapcheck // it says what it did
	}
	out, err := names.MarshalJSON(spec)
	if err != nil {
		return nil, false, fmt.Errorf("encode spec: %w", err)
	}
	return out, true, nil
}

// keys makes the digests of idempotency keys keyed.
func (s *Sealer) keys(ctx context.Context) (int, error) {
	total := 0
	for {
		rows, err := s.DB.Query(ctx, `SELECT tenant_id::text, key, digest FROM lifecycle.operation_key WHERE digest ~ '/[0-9a-f]{64}$' LIMIT $1`, sealBatch)
		if err != nil {
			return total, fmt.Errorf("list: %w", err)
		}
		type kept struct{ TenantID, Key, Digest string }
		found, err := pgx.CollectRows(rows, pgx.RowToStructByPos[kept])
		if err != nil {
			return total, fmt.Errorf("list: %w", err)
		}
		for _, k := range found {
			name, sum, _ := strings.Cut(k.Digest, "/")
			digest, err := s.Secrets.Digest(secretenv.Sum(sum))
			if err != nil {
				return total, err //nolint:wrapcheck // it says what it did
			}
			_, err = s.DB.Exec(ctx, `UPDATE lifecycle.operation_key SET digest = $4 WHERE tenant_id = $1 AND key = $2 AND digest = $3`,
				k.TenantID, k.Key, k.Digest, name+"/"+digest)
			if err != nil {
				return total, fmt.Errorf("write: %w", err)
			}
			total++
		}
		if len(found) < sealBatch {
			return total, nil
		}
	}
}
