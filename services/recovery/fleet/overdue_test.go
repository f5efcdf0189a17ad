package fleet

import (
	"testing"
	"time"

	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/internal/testkit"
)

// TestOverdueStatesAreIncidents checks that a node which is pending or quarantined for longer than that may last, by
// the policy where it has a key, is an incident of the state; that a second node joins it; that it ends when none is
// overdue; and that one which a person closed is not opened again for the same nodes.
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
	set, err := policy.NewSet(map[string]string{policy.RecoveryTokenMaxAgeSeconds: "90000"})
	if err != nil {
		t.Fatal(err)
	}
	quarantined := policy.P2.Recover()
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
			if g := got[i]; g.Key != w.Key || len(g.Nodes) != len(w.Nodes) || g.Count != w.Count || g.Version != w.Version {
				t.Errorf("after %s the incident is %+v, want %+v", now, g, w)
			}
		}
	}
	node("active")
	node("retired")
	waiting, shut := node("pending"), node("quarantined")
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
	both := row{"quarantined", []string{shut, second}, 2, 1}
	open(both)
	third := node("held")
	at(now + policy.P1.Recover() + time.Second)
	open(row{"held", []string{third}, 1, 1}, both)
	exec(`UPDATE recovery.identity SET state = 'retired', state_at = mesh.clock() WHERE state <> 'active'`)
	at(now + time.Minute)
	open()
	var versions int
	if err := pool.QueryRow(ctx, `SELECT sum(version) FROM recovery.incident`).Scan(&versions); err != nil {
		t.Fatal(err)
	}
	if versions != 7 { // four were opened and three ended by themselves
		t.Errorf("%d versions of incidents were reported, want 7", versions)
	}
}
