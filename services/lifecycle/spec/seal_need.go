package spec

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pg"
)

// KeySets lists the keys that rows need. It reads an entry of an index for each set, however many rows there are.
var KeySets = pg.Define(pg.RoleLifecycle, "spec.key_sets",
	`SELECT DISTINCT k FROM lifecycle.secret_key_set s, string_to_table(s.keys, ',') AS k WHERE k NOT IN ('', '!')
		ORDER BY k`)

// countTimeout bounds one count of rows: a refusal without numbers is better than a late one.
const countTimeout = 5 * time.Second

// Need returns the ids of the keys that rows need.
func (s *Sealer) Need(ctx context.Context) ([]string, error) {
	out, err := pg.Values[string](ctx, s.DB, KeySets)
	if err != nil {
		return nil, fmt.Errorf("list keys of workload secrets that rows need: %w", err)
	}
	return out, nil
}

var limitCounting = pg.Define(pg.RoleLifecycle, "spec.limit_counting",
	`SELECT set_config('statement_timeout', $1, true)`)

var countSecretKeys = pg.Define(pg.RoleLifecycle, "spec.count_secret_keys",
	`SELECT k AS key, sum(u.n)::bigint AS rows FROM lifecycle.secret_key_use u, string_to_table(u.keys, ',') AS k
			WHERE string_to_array(u.keys, ',') && $1::text[] AND k = ANY ($1) GROUP BY k`)

// keyCount is how many rows need a key.
type keyCount struct {
	Key  string `db:"key"`
	Rows int64  `db:"rows"`
}

// Count returns how many rows need each of some keys. It reads all of those rows, and gives up after a short while.
func (s *Sealer) Count(ctx context.Context, keys []string) (map[string]int64, error) {
	out := map[string]int64{}
	if len(keys) == 0 {
		return out, nil
	}
	err := pg.InTx(ctx, s.DB, func(ctx context.Context, tx pgx.Tx) error {
		clear(out)
		if _, err := pg.Exec(ctx, tx, limitCounting, fmt.Sprint(countTimeout.Milliseconds())); err != nil {
			return fmt.Errorf("bound the count: %w", err)
		}
		counts, err := pg.All[keyCount](ctx, tx, countSecretKeys, keys)
		for _, c := range counts {
			out[c.Key] = c.Rows
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("count rows by key of workload secrets: %w", err)
	}
	return out, nil
}

// Check refuses a set that lacks a key which rows need. Keys that an operator has declared lost are not required. After
// any other error it is unknown whether a key is missing.
func (s *Sealer) Check(ctx context.Context, lost []string) error {
	need, err := s.Need(ctx)
	if err != nil {
		return err
	}
	missing := slices.DeleteFunc(need, func(id string) bool { return s.Secrets.Has(id) || slices.Contains(lost, id) })
	if len(missing) == 0 {
		return nil
	}
	counts, err := s.Count(ctx, missing)
	unmet := make([]string, 0, len(missing))
	for _, id := range missing {
		which := "rows need"
		switch n := counts[id]; {
		case err != nil: // without numbers; the key is missing either way
		case n == 0:
			continue // its last row has gone meanwhile
		case n == 1:
			which = "1 row needs"
		default:
			which = fmt.Sprintf("%d rows need", n)
		}
		unmet = append(unmet, fmt.Sprintf("workload_secrets_keys_file has no key %s, which %s", id, which))
	}
	if len(unmet) == 0 {
		return nil
	}
	return fault.New(commonv1.Reason_REASON_WORKLOAD_SECRET_KEY_UNKNOWN,
		"stored values need keys that workload_secrets_keys_file does not have",
		fault.Unmet(unmet...), fault.Remedy("put the keys back at the end of the file, until `gpuaas migrate status` "+
			"shows no row that needs them; "+
			"if a key is lost, name it in workload_secrets_lost_keys: the workspaces whose values are under it are "+
			"created anew"))
}
