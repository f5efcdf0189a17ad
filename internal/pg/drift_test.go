package pg_test

import (
	"strings"
	"testing"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pg/migrations"
	"github.com/gpuaas/mesh/internal/testkit"
)

// Scenario: a database of an earlier build has nodes whose events may have been cut. The migration makes evidence of
// their identities and sessions, and has them judged.
func TestNodesOfAnEarlierBuildHaveAJudgement(t *testing.T) {
	testkit.IO(t)
	file, err := migrations.FS.ReadFile("00260_recovery_drift.sql")
	if err != nil {
		t.Fatal(err)
	}
	up, down, ok := strings.Cut(string(file), "-- +goose Down")
	if !ok {
		t.Fatal("the migration has no way back")
	}
	d := testkit.DB(t)
	ctx := testkit.Context(t)
	migrate := func(sql string) {
		t.Helper()
		if _, err := d.OwnerPool().Exec(ctx, sql); err != nil {
			t.Fatal(err)
		}
	}
	// Migrations that build on its tables go back first.
	for _, name := range []string{
		"00420_recovery_state_overdue.sql", "00415_recovery_record_request.sql",
		"00408_recovery_identity_suspected.sql",
		"00391_recovery_fleet_drift.sql", "00386_recovery_action.sql", "00366_recovery_profiles.sql",
		"00310_recovery_health.sql", "00300_recovery_host_record.sql", "00290_recovery_host_facts.sql",
	} {
		later, err := migrations.FS.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		_, back, _ := strings.Cut(string(later), "-- +goose Down")
		migrate(back)
	}
	migrate(down)
	if _, err := d.Pool(pg.RoleRecovery).Exec(ctx, `
		INSERT INTO recovery.identity (node_id, name, node_instance_id, state, alarm, state_reason, version)
		SELECT ('01a20000-0000-7000-8000-00000000000' || n.n)::uuid, 'node-' || n.n,
			'01a20000-0000-7000-8000-000000000009', n.state, n.alarm, 'decided', n.n
		FROM (VALUES (1, 'active', ''), (2, 'active', ''), (3, 'held', 'cloned_identity_detected'), (4, 'held', ''),
			(5, 'fenced', ''), (6, 'retired', 'token_reuse'), (7, 'pending', '')) n (n, state, alarm)`); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Pool(pg.RoleRecovery).Exec(ctx, `
		INSERT INTO recovery.watch_session (session_id, version, node_id, replica_id, generation, serving, since,
			close_reason)
		SELECT gen_random_uuid(), 3, ('01a20000-0000-7000-8000-00000000000' || s.n)::uuid, gen_random_uuid(), s.generation,
			s.serving, mesh.clock(), ''
		FROM (VALUES (1, 4, true), (1, 5, false), (2, 7, false)) s (n, generation, serving)`); err != nil {
		t.Fatal(err)
	}
	migrate(up)
	var got string
	if err := d.Pool(pg.RoleRecovery).QueryRow(ctx, `
		SELECT string_agg(format('%s %s %s %s %s: %s', right(j.node_id::text, 1), j.identity_state, j.generation,
			j.replica_id IS NOT NULL, j.silent_since IS NOT NULL, (
			SELECT string_agg(format('%s (%s, %s)', e.reason, e.detail, e.version), ' ' ORDER BY e.part)
			FROM recovery.evidence e WHERE e.node_id = j.node_id)), E'\n' ORDER BY j.node_id)
		FROM recovery.judgement j WHERE j.due_at <= mesh.clock()`).Scan(&got); err != nil {
		t.Fatal(err)
	}
	want := strings.Join([]string{
		"1 active 4 t f: unspecified (active, 1) unspecified (, 0)",
		"2 active 7 f t: unspecified (active, 2) disconnected (, 0)",
		"3 held 0 f f: cloned_identity_detected (decided, 3) disconnected (, 0)",
		"4 held 0 f f: identity_held (decided, 4) disconnected (, 0)",
		"5 fenced 0 f f: identity_revoked_or_fenced (fenced, 5) disconnected (, 0)",
		"6 retired 0 f f: identity_revoked_or_fenced (retired, 6) disconnected (, 0)",
		"7 pending 0 f f: unspecified (pending, 7)",
	}, "\n")
	if got != want {
		t.Errorf("after the migration:\n%s\nwant:\n%s", got, want)
	}
	migrate(down)
	migrate(up)
}
