package findings

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pg/schema"
	"github.com/gpuaas/mesh/internal/secretenv"
	"github.com/gpuaas/mesh/services/lifecycle/spec"
	"github.com/gpuaas/mesh/services/lifecycle/task/dispatch"
	"github.com/gpuaas/mesh/services/lifecycle/workspace"
)

// sealing returns the keys and the sealer of a replica with a key file of these lines.
func (b *bed) sealing(lines ...string) (*secretenv.Keys, *spec.Sealer, *dispatch.Server) {
	b.t.Helper()
	keys, err := secretenv.Parse(strings.Join(lines, "\n"))
	if err != nil {
		b.t.Fatal(err)
	}
	db := b.db.Pool(pg.RoleLifecycle)
	return keys, &spec.Sealer{DB: db, Secrets: keys, Committed: func() { b.core.Committed() }},
		dispatch.NewServer(dispatch.Deps{DB: db, Secrets: keys, Key: fakeAgentKey})
}

// needs returns how many rows need a key.
func (b *bed) needs(s *spec.Sealer, key string) int64 {
	b.t.Helper()
	counts, err := s.Count(b.t.Context(), []string{key})
	if err != nil {
		b.t.Fatal(err)
	}
	return counts[key]
}

// plan returns how Postgres runs a statement.
func (b *bed) plan(sql string, args ...any) string {
	b.t.Helper()
	rows, err := b.db.OwnerPool().Query(b.t.Context(), "EXPLAIN (ANALYZE, COSTS OFF, TIMING OFF) "+sql, args...)
	if err != nil {
		b.t.Fatal(err)
	}
	lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		b.t.Fatal(err)
	}
	return strings.Join(lines, "\n")
}

// TestAFormerKeyMayLeave: a new first key takes over every row, and then a start without the former one is not refused.
func TestAFormerKeyMayLeave(t *testing.T) {
	b := newBed(t, Config{})
	id := b.live("one")
	b.numbered()
	wantOnly(t, b.seen())
	spec, sum := b.asBefore(id)
	_, sealer, tasks := b.sealing(b.keyLine)
	if _, err := sealer.Seal(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := tasks.SealStored(t.Context()); err != nil {
		t.Fatal(err)
	}
	// The database and lifecycle read the same keys from a row.
	w, err := workspace.Get(t.Context(), b.db.Pool(pg.RoleLifecycle), id)
	if err != nil {
		t.Fatal(err)
	}
	stored := &lifecyclev1.WorkspaceSpec{}
	if err := names.UnmarshalInto(w.Spec, stored); err != nil {
		t.Fatal(err)
	}
	read := b.text(`SELECT lifecycle.secret_keys(spec, spec_digest) FROM lifecycle.workspace WHERE id = $1`, id)
	if want := secretenv.KeysOfSpec(stored, w.SpecDigest); read != want || want != b.keys.First() {
		t.Errorf("the database reads the keys %q, want %q", read, want)
	}

	next := secretenv.NewKey()
	_, alone, _ := b.sealing(next)
	refused := alone.Check(t.Context(), nil)
	e, _ := fault.As(refused)
	if !fault.Has(refused, commonv1.Reason_REASON_WORKLOAD_SECRET_KEY_UNKNOWN) ||
		!strings.Contains(strings.Join(e.Unmet, ""),
			fmt.Sprintf("workload_secrets_keys_file has no key %s, which %d rows need", b.keys.First(),
				b.needs(alone, b.keys.First()))) ||
		!strings.Contains(e.Remedy, "workload_secrets_lost_keys") {
		t.Errorf("a start without a key that rows need: %v", refused)
	}
	if err := alone.Check(t.Context(), []string{b.keys.First()}); err != nil {
		t.Errorf("a key that was given up for lost: %v", err)
	}

	keys, both, tasks := b.sealing(next, b.keyLine)
	need := b.needs(both, b.keys.First())
	// The digest of an idempotency key has no spec from which it could be made again: it needs its key until it is
	// deleted, after 30 days.
	left := int64(1)
	if need < 4 {
		t.Fatalf("%d rows need the former key", need)
	}
	rows, err := both.Seal(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	queued, err := tasks.SealStored(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if int64(rows+queued) != need-left || queued == 0 {
		t.Errorf("%d rows and %d tasks were sealed, want %d", rows, queued, need-left)
	}
	if got := b.needs(both, b.keys.First()); got != left {
		t.Errorf("%d rows still need the former key, want %d", got, left)
	}
	if rows, err := both.Seal(t.Context()); rows != 0 || err != nil {
		t.Errorf("%d rows were sealed again: %v", rows, err)
	}
	if queued, err := tasks.SealStored(t.Context()); queued != 0 || err != nil {
		t.Errorf("%d tasks were sealed again: %v", queued, err)
	}
	if _, err := b.db.OwnerPool().Exec(t.Context(), `DELETE FROM lifecycle.operation_key`); err != nil {
		t.Fatal(err)
	}
	if err := alone.Check(t.Context(), nil); err != nil {
		t.Errorf("a start without the former key: %v", err)
	}
	// The new key alone opens the values and knows the digest.
	if w, err = workspace.Get(t.Context(), b.db.Pool(pg.RoleLifecycle), id); err != nil {
		t.Fatal(err)
	}
	if same, err := alone.Secrets.Matches(w.SpecDigest, sum); !same || err != nil {
		t.Errorf("the digest is of another spec: %v", err)
	}
	if err := names.UnmarshalInto(w.Spec, stored); err != nil {
		t.Fatal(err)
	}
	deploy := &nodev1.WorkloadDeploy{Workload: stored.GetWorkloads()[0]}
	if err := alone.Secrets.OpenDeploy(deploy, secretenv.Owner{TenantID: w.TenantID, WorkspaceID: id}); err != nil ||
		deploy.GetWorkload().GetEnv()["FOO"] != spec.GetWorkloads()[0].GetEnv()["FOO"] {
		t.Errorf("under the new key: %v, %v", deploy.GetWorkload(), err)
	}
	if uses, err := schema.SecretKeyUses(t.Context(), b.db.URL(pg.RoleOwner)); err != nil || len(uses) == 0 ||
		uses[0].Key != keys.First() {
		t.Errorf("the status of the keys: %v, %v", uses, err)
	}
	b.numbered()
	wantOnly(t, b.seen())
}

// TestWhatIsSealedIsNotRead: the next round does not read rows sealed with the first key, however many there are.
func TestWhatIsSealedIsNotRead(t *testing.T) {
	b := newBed(t, Config{})
	_, sealer, tasks := b.sealing(b.keyLine)
	owner := b.db.OwnerPool()
	first := b.keys.First()
	if _, err := owner.Exec(t.Context(),
		`INSERT INTO lifecycle.task (task_id, type, node_id, state, idem_key, payload, expires_at, secret_keys)
		SELECT gen_random_uuid(), 'workload.deploy', gen_random_uuid(), 'expired', 'k' || i, '\x01', mesh.clock(), $1
			FROM generate_series(1, 5000) i`, first); err != nil {
		t.Fatal(err)
	}
	if _, err := owner.Exec(t.Context(), `ANALYZE lifecycle.task`); err != nil {
		t.Fatal(err)
	}
	for _, part := range secretenv.Others(first) {
		plan := b.plan(dispatch.StoredDeploys.SQL(), part.From, part.FromID, part.Below, 100)
		if !strings.Contains(plan, "task_secret_keys") || strings.Contains(plan, "Seq Scan") ||
			!strings.Contains(plan, "rows=0 ") {
			t.Errorf("the deploys that are not under the first key are read by\n%s", plan)
		}
	}
	if n, err := tasks.SealStored(t.Context()); n != 0 || err != nil {
		t.Errorf("%d: %v", n, err)
	}
	if n, err := sealer.Seal(t.Context()); n != 0 || err != nil {
		t.Errorf("%d: %v", n, err)
	}
}

// TestTheCheckReadsNoRows: the reads of the check at a start grow with the sets of keys, not with the rows that need
// them.
func TestTheCheckReadsNoRows(t *testing.T) {
	b := newBed(t, Config{})
	id := b.live("one")
	_, sealer, _ := b.sealing(b.keyLine)
	first := b.keys.First()
	const many, some = 20000, 2000
	for table, sql := range map[string]string{
		"task": `INSERT INTO lifecycle.task (task_id, type, node_id, state, idem_key, payload, expires_at, secret_keys)
			SELECT gen_random_uuid(), 'workload.deploy', gen_random_uuid(), 'expired', 'k' || i, '\x01', mesh.clock(), $2
			FROM generate_series(1, $3::int) i WHERE $1::text <> ''`,
		"operation_key": `INSERT INTO lifecycle.operation_key (tenant_id, key, digest, run_id)
			SELECT gen_random_uuid(), 'k' || i, 'create/hmac-sha256.' || $2::text || '.00', gen_random_uuid()
			FROM generate_series(1, $3::int) i WHERE $1::text <> ''`,
		"workspace": `INSERT INTO lifecycle.workspace
			SELECT (jsonb_populate_record(w, jsonb_build_object('id', gen_random_uuid(), 'name', 'n' || i,
				'spec_digest', 'hmac-sha256.' || $2::text || '.00'))).*
			FROM lifecycle.workspace w, generate_series(1, $3::int) i WHERE w.id = $1::uuid`,
		"saga_run": `INSERT INTO lifecycle.saga_run
			SELECT (jsonb_populate_record(r, jsonb_build_object('id', gen_random_uuid(), 'input', jsonb_build_object(
				'spec', jsonb_build_object('workloads',
					jsonb_build_array(jsonb_build_object('sealed_env', jsonb_build_object('A', encode(
					'\x01'::bytea || decode($2::text, 'hex') || '\x000000'::bytea, 'base64'))))))))).*
			FROM lifecycle.saga_run r, generate_series(1, $3::int) i
			WHERE r.id = (SELECT id FROM lifecycle.saga_run WHERE workspace_id = $1::uuid LIMIT 1)`,
	} {
		n := many
		if table == "workspace" || table == "saga_run" {
			n = some // their triggers take time
		}
		if _, err := b.db.OwnerPool().Exec(t.Context(), sql, id, first, n); err != nil {
			t.Fatalf("%s: %v", table, err)
		}
		if _, err := b.db.OwnerPool().Exec(t.Context(), "ANALYZE lifecycle."+table); err != nil {
			t.Fatal(err)
		}
	}
	if n := b.needs(sealer, first); n < 2*(many+some) {
		t.Fatalf("%d rows need the key", n)
	}
	plan := b.plan(spec.KeySets.SQL())
	for _, index := range []string{
		"workspace_secret_keys", "run_secret_keys", "task_secret_keys",
		"operation_key_secret_keys",
	} {
		if !strings.Contains(plan, index) {
			t.Errorf("%s is not used", index)
		}
	}
	read := 0
	for _, node := range regexp.MustCompile(
		`actual rows=(\d+) loops=(\d+)|Rows Removed by [^:]*: (\d+)`,
	).FindAllStringSubmatch(plan, -1) {
		rows, _ := strconv.Atoi(node[1])
		loops, _ := strconv.Atoi(node[2])
		removed, _ := strconv.Atoi(node[3])
		read += rows*loops + removed
	}
	// Each table has the set of the first key, and may have that of nothing sealed yet: some nodes of the plan pass each
	// of them on.
	if read == 0 || read > 200 {
		t.Errorf("the check passes %d rows on", read)
	}
	if t.Failed() {
		t.Log(plan)
	}
	_, other, _ := b.sealing(secretenv.NewKey())
	if err := other.Check(t.Context(), nil); !fault.Has(err, commonv1.Reason_REASON_WORKLOAD_SECRET_KEY_UNKNOWN) {
		t.Errorf("a start without the key: %v", err)
	}
}
