package nodeapi_test

import (
	"errors"
	"testing"
	"time"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
)

// TestAReplicaThatComesBackReportsItsSessions checks that a replica whose beats were missing, as of one that is cut off
// from the database, reports its sessions once more: they go on, and nothing else would tell it.
func TestAReplicaThatComesBackReportsItsSessions(t *testing.T) {
	k := newKit(t)
	a := k.session(k.replica())
	testkit.Eventually(t, patience, func() error {
		var rows int
		err := k.db.Pool(pg.RoleNodeAPI).QueryRow(t.Context(), `SELECT count(*) FROM mesh.replica`).Scan(&rows)
		if err == nil && rows != 1 {
			err = errors.New("the replica has not beaten yet")
		}
		return err
	})
	testkit.SetClockOffset(k.db, 20*time.Second) // the next beat comes after a silence by the database's clock
	testkit.Eventually(t, patience, func() error {
		list, err := testkit.ReadEvents(t.Context(), k.db.Pool(pg.RoleReadmodel),
			`kind = 'session.changed' AND aggregate_id = $1`, a.session)
		if err == nil && len(list) < 2 {
			err = errors.New("the session is not reported again")
		}
		if err != nil {
			return err
		}
		for _, e := range list {
			if e.Text("state") != "SESSION_STATE_ADMITTED" || e.Text("late") == "true" {
				t.Fatalf("the session is reported as %s, late: %q", e.Text("state"), e.Text("late"))
			}
		}
		return nil
	})
}
