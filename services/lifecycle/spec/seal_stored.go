package spec

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/secretenv"
	"github.com/gpuaas/mesh/services/lifecycle/workspace"
)

// sealBatch bounds the number of rows that are read at once.
const sealBatch = 200

// Sealer seals stored values again under the first key: specs of workspaces and runs, and the digests of specs, whether
// a former first key sealed them or a build from before sealed values stored them. It changes each row once, reads none
// that is under the first key, and finds nothing when it is run again.
type Sealer struct {
	DB        *pgxpool.Pool
	Secrets   *secretenv.Keys
	Committed func()
}

// keyed names a table whose rows are under keys, and the keys of a row: the expression of an index.
type keyed struct{ table, keys string }

var (
	keyedWorkspaces = keyed{"workspace", "lifecycle.secret_keys(spec, spec_digest)"}
	keyedRuns       = keyed{"saga_run", "lifecycle.secret_keys(input->'spec', '')"}
)

// keyedRow is a row and the keys that it is under.
type keyedRow struct {
	ID   string `db:"id"`
	Keys string `db:"keys"`
}

// rowsUnderKeys lists rows whose keys are in a range.
var rowsUnderKeys = pg.DefineDynamic(pg.RoleLifecycle, "spec.rows_under_keys", func(of keyed) string {
	return fmt.Sprintf(`SELECT id::text AS id, (%[2]s) COLLATE "C" AS keys FROM lifecycle.%[1]s
	WHERE %[2]s <> '' AND ((%[2]s) COLLATE "C", lifecycle.%[1]s.id) > ($1, $2::uuid) AND (%[2]s) COLLATE "C" < $3
	ORDER BY (%[2]s) COLLATE "C", lifecycle.%[1]s.id LIMIT $4`, of.table, of.keys)
}, keyedWorkspaces, keyedRuns)

// Seal brings every row there is under the first key, and returns how many it changed. A row under a key that was
// declared lost, which this set does not have, is skipped. A row that cannot be opened stays as it is; Seal returns the
// error after all other rows are done.
func (s *Sealer) Seal(ctx context.Context) (int, error) {
	total := 0
	var failed error
	for _, kind := range []struct {
		keyed

		seal func(ctx context.Context, id string) (bool, error)
	}{
		{keyedWorkspaces, s.workspace},
		{keyedRuns, s.run},
	} {
		n, err := s.each(ctx, rowsUnderKeys.For(kind.keyed), kind.seal)
		total += n
		if err != nil {
			failed = errors.Join(failed, fmt.Errorf("seal stored %ss: %w", kind.table, err))
		}
	}
	n, err := s.keys(ctx)
	if err != nil {
		failed = errors.Join(failed, fmt.Errorf("seal stored idempotency keys: %w", err))
	}
	return total + n, failed
}

// each seals the rows that a query lists by their keys and ids, in order.
func (s *Sealer) each(ctx context.Context, query *pg.Statement, seal func(context.Context, string) (bool, error)) (int,
	error,
) {
	total := 0
	var failed error
	for _, part := range secretenv.Others(s.Secrets.First()) {
		keys, last := part.From, part.FromID
		for {
			found, err := pg.All[keyedRow](ctx, s.DB, query, keys, last, part.Below, sealBatch)
			if err != nil {
				return total, fmt.Errorf("list: %w", err)
			}
			for _, one := range found {
				keys, last = one.Keys, one.ID
				if !s.Secrets.HasAll(one.Keys) {
					continue // a key that was given up for lost
				}
				changed, err := seal(ctx, one.ID)
				if err != nil {
					failed = errors.Join(failed, err)
				}
				if changed {
					total++
				}
			}
			if len(found) < sealBatch {
				break
			}
		}
	}
	return total, failed
}

// storedSpec is a workspace's spec as it is stored.
type storedSpec struct {
	TenantID string          `db:"tenant_id" expr:"@.tenant_id::text"`
	Spec     json.RawMessage `db:"spec"`
	Digest   string          `db:"spec_digest"`
}

var lockSpec = pg.Define(pg.RoleLifecycle, "spec.lock_spec",
	`SELECT `+pg.Columns[storedSpec]("w")+` FROM lifecycle.workspace w WHERE w.id = $1 FOR NO KEY UPDATE`)

var writeSpec = pg.Define(pg.RoleLifecycle, "spec.write_spec",
	`UPDATE lifecycle.workspace SET spec = $2, spec_digest = $3, version = version + 1 WHERE id = $1`)

// workspace brings one workspace's spec and digest under the first key, and announces the row: consumers of the events
// get the new digest that way.
func (s *Sealer) workspace(ctx context.Context, id string) (bool, error) {
	changed := false
	err := pg.InTx(ctx, s.DB, func(ctx context.Context, tx pgx.Tx) error {
		changed = false
		stored, err := pg.One[storedSpec](ctx, tx, lockSpec, id)
		if errors.Is(err, pgx.ErrNoRows) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read workspace %s: %w", id, err)
		}
		digest := stored.Digest
		sealed, sum, err := s.spec(stored.Spec, digest, secretenv.Owner{TenantID: stored.TenantID, WorkspaceID: id})
		if err != nil {
			return fmt.Errorf("workspace %s: %w", id, err)
		}
		if sealed == nil {
			return nil // another replica has changed the row
		}
		if bare, ok := secretenv.Bare(digest); ok {
			sum = bare
		}
		if digest != "" {
			if digest, err = s.Secrets.Digest(sum); err != nil {
				return err
			}
		}
		if _, err = pg.Exec(ctx, tx, writeSpec, id, sealed, digest); err != nil {
			return fmt.Errorf("seal workspace %s: %w", id, err)
		}
		changed = true
		_, _, err = workspace.Announce(ctx, tx, id)
		return err
	})
	if err == nil && changed {
		s.Committed()
	}
	return changed, err
}

// storedInput is the input of a run as it is stored.
type storedInput struct {
	TenantID    string          `db:"tenant_id" expr:"@.tenant_id::text"`
	WorkspaceID string          `db:"workspace_id" expr:"@.workspace_id::text"`
	Input       json.RawMessage `db:"input"`
}

var inputOfRun = pg.Define(pg.RoleLifecycle, "spec.input_of_run",
	`SELECT `+pg.Columns[storedInput]("r")+` FROM lifecycle.saga_run r WHERE r.id = $1`)

var writeInputSpec = pg.Define(pg.RoleLifecycle, "spec.write_input_spec",
	`UPDATE lifecycle.saga_run SET input = jsonb_set(input, '{spec}', $2::jsonb) WHERE id = $1 AND input = $3::jsonb`)

// run seals the spec in one run's input. No event has the input, so that the row's version stays.
func (s *Sealer) run(ctx context.Context, id string) (bool, error) {
	stored, err := pg.One[storedInput](ctx, s.DB, inputOfRun, id)
	if errors.Is(err, pgx.ErrNoRows) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("read run %s: %w", id, err)
	}
	var in struct {
		Spec json.RawMessage `json:"spec"`
	}
	if err := json.Unmarshal(stored.Input, &in); err != nil {
		return false, fmt.Errorf("read input of run %s: %w", id, err)
	}
	owner := secretenv.Owner{TenantID: stored.TenantID, WorkspaceID: stored.WorkspaceID}
	sealed, _, err := s.spec(in.Spec, "", owner)
	if err != nil {
		return false, fmt.Errorf("run %s: %w", id, err)
	}
	if sealed == nil {
		return false, nil
	}
	// The other fields of the input stay. An input that was amended meanwhile is read again by the next Seal.
	tag, err := pg.Exec(ctx, s.DB, writeInputSpec, id, sealed, stored.Input)
	if err != nil {
		return false, fmt.Errorf("seal input of run %s: %w", id, err)
	}
	return tag.RowsAffected() > 0, nil
}

// spec seals a stored spec again under the first key; it returns nil if the spec and its digest are under that key
// already. The sum is that of the spec with its values.
func (s *Sealer) spec(raw json.RawMessage, digest string, owner secretenv.Owner) (json.RawMessage, secretenv.Sum,
	error,
) {
	spec := &lifecyclev1.WorkspaceSpec{}
	if err := names.UnmarshalInto(raw, spec); err != nil {
		return nil, "", fmt.Errorf("read spec: %w", err)
	}
	if keys := secretenv.KeysOfSpec(spec, digest); keys == "" || keys == s.Secrets.First() {
		return nil, "", nil
	}
	spec, sum, err := s.Secrets.Reseal(spec, owner)
	if err != nil {
		return nil, "", err
	}
	out, err := names.MarshalJSON(spec)
	if err != nil {
		return nil, "", fmt.Errorf("encode spec: %w", err)
	}
	return out, sum, nil
}

// keptKey is an idempotency key that was used before.
type keptKey struct {
	TenantID string `db:"tenant_id" expr:"@.tenant_id::text"`
	Key      string `db:"key"`
	Digest   string `db:"digest"`
}

var bareOperationKeys = pg.Define(pg.RoleLifecycle, "spec.bare_operation_keys",
	`SELECT `+pg.Columns[keptKey]("k")+` FROM lifecycle.operation_key k WHERE k.digest ~ '/[0-9a-f]{64}$' LIMIT $1`)

var writeKeyDigest = pg.Define(pg.RoleLifecycle, "spec.write_key_digest",
	`UPDATE lifecycle.operation_key SET digest = $4 WHERE tenant_id = $1 AND key = $2 AND digest = $3`)

// keys makes the digests of idempotency keys keyed.
func (s *Sealer) keys(ctx context.Context) (int, error) {
	total := 0
	for {
		found, err := pg.All[keptKey](ctx, s.DB, bareOperationKeys, sealBatch)
		if err != nil {
			return total, fmt.Errorf("list: %w", err)
		}
		slices.SortFunc(found, func(a, b keptKey) int { // the order in which replicas lock them
			return cmp.Or(strings.Compare(a.TenantID, b.TenantID), strings.Compare(a.Key, b.Key))
		})
		var batch pg.Batch
		for _, k := range found {
			name, sum, _ := strings.Cut(k.Digest, "/")
			digest, err := s.Secrets.Digest(secretenv.Sum(sum))
			if err != nil {
				return total, err
			}
			batch.Queue(writeKeyDigest, k.TenantID, k.Key, k.Digest, name+"/"+digest)
		}
		if len(found) > 0 {
			if err := batch.Send(ctx, s.DB); err != nil {
				return total, fmt.Errorf("write: %w", err)
			}
		}
		total += len(found)
		if len(found) < sealBatch {
			return total, nil
		}
	}
}
