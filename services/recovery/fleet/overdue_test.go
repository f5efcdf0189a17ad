package fleet

import (
	"slices"
	"testing"
	"time"

	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/internal/testkit"
)

// TestOverdueStatesAreIncidents checks that a node which is pending, on hold, quarantined or fenced for longer than the
// policy lets it is an incident of the state; that a second node joins it; that it ends when none is overdue; and that
// nodes of one which a person closed are named by none that follows, until they have left the state.
func TestOverdueStatesAreIncidents(t *testing.T) {
	testkit.IO(t)
	ctx, db := testkit.Context(t), testkit.DB(t)
	testkit.StopClock(db)
	pool := db.Pool(pg.RoleRecovery)
	exec := func(sql string, args ...any) {
		t.Helper()
		if _, err := db.OwnerPool().Exec(ctx, sql, args...); err != nil {
			t.Fatal(err)
		}
	}
	node := func(state string) string {
		t.Helper()
		id := ids.New()
		exec(`INSERT INTO recovery.identity (node_id, name, node_instance_id, state) VALUES ($1, $2, $3, $4)`, id, "n-"+id,
			ids.New(), state)
		return id
	}
	set, err := policy.NewSet(map[string]string{
		policy.RecoveryTokenMaxAgeSeconds: "90000", policy.BudgetP1RecoverSeconds: "600",
		policy.BudgetP2RecoverSeconds: "7200", policy.FencedReviewSeconds: "100000",
	})
	if err != nil {
		t.Fatal(err)
	}
	const held, quarantined, fenced = 10 * time.Minute, 2 * time.Hour, 100_000 * time.Second
	now := time.Duration(0)
	at := func(by time.Duration) {
		t.Helper()
		now = by
		testkit.SetClockOffset(db, now)
		if err := EvaluateOverdue(ctx, pool, testkit.Logger(t), set); err != nil {
			t.Fatal(err)
		}
	}
	type row struct {
		Key     string   `db:"key"`
		Nodes   []string `db:"node_ids"`
		Count   int64    `db:"count"`
		Version int64    `db:"version"`
	}
	open := func(want ...row) {
		t.Helper()
		var got []row
		rows, err := pool.Query(ctx, `SELECT key, node_ids::text[], count, version FROM recovery.incident
			WHERE kind = 'state_overdue' AND closed_at IS NULL AND severity = 'p1' ORDER BY key`)
		if err != nil {
			t.Fatal(err)
		}
		defer rows.Close()
		for rows.Next() {
			var r row
			if err := rows.Scan(&r.Key, &r.Nodes, &r.Count, &r.Version); err != nil {
				t.Fatal(err)
			}
			got = append(got, r)
		}
		if len(got) != len(want) {
			t.Fatalf("after %s %d incidents are open, want %d: %v", now, len(got), len(want), got)
		}
		for i, w := range want {
			if g := got[i]; g.Key != w.Key || !slices.Equal(g.Nodes, w.Nodes) || g.Count != w.Count ||
				g.Version != w.Version {
				t.Errorf("after %s the incident is %+v, want %+v", now, g, w)
			}
		}
	}
	node("active")
	node("retired")
	waiting, shut, apart := node("pending"), node("quarantined"), node("fenced")
	at(quarantined - time.Second)
	open()
	at(quarantined + time.Second)
	away := row{"quarantined", []string{shut}, 1, 1}
	open(away)
	at(quarantined + time.Minute) // nothing is written meanwhile
	open(away)
	at(25*time.Hour + time.Second)
	pending := row{"pending", []string{waiting}, 1, 1}
	open(pending, away)
	exec(`UPDATE recovery.incident SET closed_at = mesh.clock(), closed_by = 'ann' WHERE key = 'quarantined'`)
	at(25*time.Hour + time.Minute) // a person has closed it
	open(pending)
	exec(`UPDATE recovery.identity SET state = 'active', state_at = mesh.clock() WHERE node_id = $1`, waiting)
	second := node("quarantined")
	at(25*time.Hour + 2*time.Minute)
	open()
	at(25*time.Hour + 2*time.Minute + quarantined)
	late := row{"quarantined", []string{second}, 1, 1} // the first was named by the one that a person closed
	open(late)
	third := node("held")
	at(now + held - time.Second)
	open(late)
	at(now + 2*time.Second)
	waits := row{"held", []string{third}, 1, 1}
	open(waits, late)
	at(fenced + time.Second)
	kept := row{"fenced", []string{apart}, 1, 1}
	open(kept, waits, late)
	exec(`UPDATE recovery.identity SET state = 'active', state_at = mesh.clock() WHERE node_id = $1`, second)
	at(now + time.Minute) // the first goes on, and the incident of the second ends
	open(kept, waits)
	exec(`UPDATE recovery.identity SET state_at = mesh.clock() WHERE node_id = $1`, shut) // it was active meanwhile
	at(now + quarantined + time.Second)
	again := row{"quarantined", []string{shut}, 1, 1}
	open(kept, waits, again)
	set, err = policy.NewSet(nil)
	if err != nil {
		t.Fatal(err)
	}
	at(now + time.Minute) // a fence may last a week now, and a quarantine a day
	waits.Version = 2     // the budget is another
	open(waits)
	exec(`UPDATE recovery.identity SET state = 'retired', state_at = mesh.clock() WHERE state <> 'active'`)
	at(now + time.Minute)
	open()
	var versions int
	if err := pool.QueryRow(ctx, `SELECT sum(version) FROM recovery.incident`).Scan(&versions); err != nil {
		t.Fatal(err)
	}
	if versions != 12 { // six were opened, one was written again, and all but that which a person closed ended
		t.Errorf("%d versions of incidents were reported, want 12", versions)
	}
}

// TestAnIncidentOfManyOverdueNodesNamesNoneAgain checks that nodes which an incident counted and did not name, because
// they were more than it names, are as little named again after a person has closed it as those that it named.
func TestAnIncidentOfManyOverdueNodesNamesNoneAgain(t *testing.T) {
	testkit.IO(t)
	ctx, db := testkit.Context(t), testkit.DB(t)
	testkit.StopClock(db)
	exec := func(sql string, args ...any) {
		t.Helper()
		if _, err := db.OwnerPool().Exec(ctx, sql, args...); err != nil {
			t.Fatal(err)
		}
	}
	quarantine := func(count int) {
		t.Helper()
		exec(`INSERT INTO recovery.identity (node_id, name, node_instance_id, state)
			SELECT id, 'n-' || id, gen_random_uuid(), 'quarantined'
			FROM (SELECT gen_random_uuid() AS id FROM generate_series(1, $1)) x`, count)
	}
	evaluate := func(after time.Duration, want int64) {
		t.Helper()
		testkit.SetClockOffset(db, after)
		if err := EvaluateOverdue(ctx, db.Pool(pg.RoleRecovery), testkit.Logger(t), policy.Defaults()); err != nil {
			t.Fatal(err)
		}
		var count int64
		if err := db.OwnerPool().QueryRow(ctx, `SELECT coalesce(sum(count), 0) FROM recovery.incident
			WHERE closed_at IS NULL`).Scan(&count); err != nil {
			t.Fatal(err)
		}
		if count != want {
			t.Errorf("after %s the open incident is of %d nodes, want %d", after, count, want)
		}
	}
	day := policy.P2.Recover()
	quarantine(mostSampled + 5)
	evaluate(day+time.Second, mostSampled+5)
	quarantine(1)
	evaluate(day+time.Minute, mostSampled+5)
	exec(`UPDATE recovery.incident SET closed_at = mesh.clock(), closed_by = 'ann'`)
	evaluate(day+time.Hour, 0)
	evaluate(2*day+time.Minute, 1)
}
