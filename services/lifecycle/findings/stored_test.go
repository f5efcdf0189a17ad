package findings

import (
	"context"
	"io/fs"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"google.golang.org/protobuf/proto"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pg/migrations"
	"github.com/gpuaas/mesh/internal/secretenv"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/spec"
	"github.com/gpuaas/mesh/services/lifecycle/workspace"
)

const canary = "ENVCANARY-91be"

// asBefore rewrites a workspace as a build before sealed values would have stored it: its values in the clear in each
// row, a bare digest, and an event with both. It returns the spec and its sum.
func (b *bed) asBefore(id string) (*lifecyclev1.WorkspaceSpec, secretenv.Sum) {
	b.t.Helper()
	var sum secretenv.Sum
	spec := &lifecyclev1.WorkspaceSpec{}
	err := pg.InTx(b.t.Context(), b.db.OwnerPool(), func(ctx context.Context, tx pgx.Tx) error {
		w, err := workspace.Get(ctx, tx, id)
		if err != nil {
			return err
		}
		if err := names.UnmarshalInto(w.Spec, spec); err != nil {
			return err
		}
		spec.Workloads[0].Env = map[string]string{"FOO": canary, "BAR": ""}
		raw, err := names.MarshalJSON(spec)
		if err != nil {
			return err
		}
		if sum, err = secretenv.SumOf(spec); err != nil {
			return err
		}
		shown, err := w.Proto()
		if err != nil {
			return err
		}
		shown.Spec, shown.SpecDigest, shown.Version = spec, string(sum), w.Version+1
		deploy, err := proto.Marshal(&nodev1.WorkloadDeploy{
			Workload:  spec.GetWorkloads()[0],
			SecretEnv: map[string]string{"DATABASE_URL": canary},
		})
		if err != nil {
			return err
		}
		for sql, args := range map[string][]any{
			`UPDATE lifecycle.workspace SET spec = $2, spec_digest = $3, version = version + 1
				WHERE id = $1`: {id, raw, string(sum)},
			`UPDATE lifecycle.saga_run SET input = jsonb_set(input, '{spec}', $2)
				WHERE workspace_id = $1`: {id, raw},
			`UPDATE lifecycle.task SET state = 'expired', payload = $2, secret_keys = NULL
				WHERE workspace_id = $1 AND type = 'workload.deploy'`: {id, deploy},
			`INSERT INTO lifecycle.operation_key (tenant_id, key, digest, run_id)
				SELECT tenant_id, 'key-1', name || '/' || $2, run_id FROM lifecycle.workspace WHERE id = $1`: {id, string(sum)},
			// The row that the projection of that build stored.
			`INSERT INTO readmodel.workspace (workspace_id, version, tenant_id, tenant, name, state, body)
				SELECT id, version, tenant_id, 'x', name, state, jsonb_build_object('spec', $2::jsonb) FROM lifecycle.workspace
					WHERE id = $1`: {id, raw},
		} {
			tag, err := tx.Exec(ctx, sql, args...)
			if err != nil || tag.RowsAffected() == 0 {
				b.t.Errorf("%s: %d rows, %v", sql, tag.RowsAffected(), err)
			}
		}
		return nil
	})
	if err != nil {
		b.t.Fatal(err)
	}
	err = pg.InTx(b.t.Context(), b.db.Pool(pg.RoleLifecycle), func(ctx context.Context, tx pgx.Tx) error {
		w, err := workspace.Get(ctx, tx, id)
		if err != nil {
			return err
		}
		shown, err := w.Proto()
		if err != nil {
			return err
		}
		shown.Spec = spec
		_, err = events.Append(ctx, tx, events.Event{
			Kind: "workspace.changed", AggregateType: "workspace", AggregateID: id, AggregateVersion: w.Version, Payload: shown,
			Correlation: events.Correlation{TenantID: w.TenantID, WorkspaceID: id},
		})
		return err
	})
	if err != nil {
		b.t.Fatal(err)
	}
	return spec, sum
}

// TestWhatEarlierBuildsStoredIsSealed takes a database of an earlier build through the migration and the start of
// lifecycle.
func TestWhatEarlierBuildsStoredIsSealed(t *testing.T) {
	b := newBed(t, Config{})
	id := b.live("one")
	b.numbered()
	wantOnly(t, b.seen())
	before, sum := b.asBefore(id)
	sql, err := fs.ReadFile(migrations.FS, "00067_workload_secrets.sql")
	if err != nil {
		t.Fatal(err)
	}
	guard, err := fs.ReadFile(migrations.FS, "00033_lifecycle_findings.sql")
	if err != nil {
		t.Fatal(err)
	}
	up, _, _ := strings.Cut(string(sql), "-- +goose Down")
	// The migration also takes the values out of a table that a later one removes.
	witness := regexp.MustCompile(`(?s)CREATE TABLE lifecycle.row_witness \(.*?\) WITH`).FindString(string(guard))
	for _, sql := range []string{strings.TrimSuffix(witness, "WITH"), up, `DROP TABLE lifecycle.row_witness`} {
		if _, err := b.db.OwnerPool().Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	// Before lifecycle has sealed anything the guard finds nothing wrong, whether it has followed the last event or not.
	b.numbered()
	wantOnly(t, b.seen())

	sealer := spec.Sealer{DB: b.db.Pool(pg.RoleLifecycle), Secrets: b.keys, Committed: func() { b.core.Committed() }}
	if n, err := sealer.Seal(t.Context()); err != nil || n < 3 {
		t.Fatalf("sealed %d rows: %v", n, err)
	}
	if n, err := b.world.tasks.SealStored(t.Context()); err != nil || n < 1 {
		t.Fatalf("sealed %d tasks: %v", n, err)
	}
	b.numbered()
	wantOnly(t, b.seen())
	for _, table := range testkit.Mentions(t, b.db.AdminURL(), canary) {
		if !strings.HasPrefix(table, "events.") {
			t.Errorf("the value stands in %s", table)
		}
	}
	if bare := b.text(`SELECT count(*)::text FROM (SELECT spec_digest AS d FROM lifecycle.workspace UNION ALL SELECT digest
		FROM lifecycle.operation_key) x WHERE d LIKE '%' || $1`, string(sum)); bare != "0" {
		t.Errorf("%s bare digests are left", bare)
	}
	w, err := workspace.Get(t.Context(), b.db.Pool(pg.RoleLifecycle), id)
	if err != nil {
		t.Fatal(err)
	}
	if same, err := b.keys.Matches(w.SpecDigest, sum); !same || err != nil {
		t.Errorf("the digest is of another spec: %v", err)
	}
	stored := &lifecyclev1.WorkspaceSpec{}
	if err := names.UnmarshalInto(w.Spec, stored); err != nil {
		t.Fatal(err)
	}
	deploy := &nodev1.WorkloadDeploy{Workload: stored.GetWorkloads()[0]}
	if err := b.keys.OpenDeploy(deploy, secretenv.Owner{TenantID: w.TenantID, WorkspaceID: id}); err != nil ||
		!cmp.Equal(deploy.GetWorkload().GetEnv(), before.GetWorkloads()[0].GetEnv()) {
		t.Errorf("sealed %v: %v", deploy.GetWorkload(), err)
	}
	var shown []string
	if err := b.db.OwnerPool().QueryRow(t.Context(),
		`SELECT ARRAY(SELECT jsonb_array_elements_text(body->'spec'->'workloads'->0->'env_names'))
		FROM readmodel.workspace
			WHERE workspace_id = $1`, id).Scan(&shown); err != nil || !cmp.Equal(shown, []string{"BAR", "FOO"}) {
		t.Errorf("the projection shows %v: %v", shown, err)
	}
	// The projection of an event of that build equals the row that the migration made, so that a rebuild finds no
	// difference.
	old, err := names.MarshalJSON(before)
	if err != nil {
		t.Fatal(err)
	}
	projected, err := secretenv.ShowNamesIn([]byte(`{"spec": ` + string(old) + `}`))
	if err != nil {
		t.Fatal(err)
	}
	var same bool
	if err := b.db.OwnerPool().QueryRow(t.Context(),
		`SELECT body = $2::jsonb FROM readmodel.workspace WHERE workspace_id = $1`, id, projected).Scan(&same); err != nil ||
		!same {
		t.Errorf("the migration and the projection differ: %v", err)
	}
	if n, err := sealer.Seal(t.Context()); n != 0 || err != nil {
		t.Errorf("sealed %d rows again: %v", n, err)
	}
	if n, err := b.world.tasks.SealStored(t.Context()); n != 0 || err != nil {
		t.Errorf("sealed %d tasks again: %v", n, err)
	}
	// The workspace goes on as any other: the next epoch is deployed with the values.
	if err := b.operate(t.Context(), commonv1.OperationKind_OPERATION_KIND_RECREATE, id); err != nil {
		t.Error(err)
	}
	b.until(id, commonv1.WorkspaceState_WORKSPACE_STATE_RECREATING, commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE)
}
