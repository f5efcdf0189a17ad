package pg_test

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pg/schema"
	"github.com/gpuaas/mesh/internal/testkit"
)

// A restore is declared with all services stopped: otherwise the error names the connected services, and nothing is
// changed.
func TestDeclareRestoredRefusesWhileServicesAreConnected(t *testing.T) {
	testkit.IO(t)
	d := testkit.DB(t)
	pool := d.Pool(pg.RoleLifecycle)
	if err := pool.Ping(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, owner := range []string{d.URL(pg.RoleOwner), d.AdminURL()} {
		_, err := schema.DeclareRestored(t.Context(), owner, "the disk was lost")
		refused, ok := errors.AsType[*schema.ServicesConnectedError](err)
		if !ok || !slices.Contains(refused.Connected, "lifecycle (test lifecycle) x1") || !strings.Contains(err.Error(),
			"stop every service") {
			t.Fatalf("%v", err)
		}
	}
	if state, known, err := schema.RollbackStatus(t.Context(), d.URL(pg.RoleOwner)); err != nil || !known ||
		state.Era != 0 || state.Active {
		t.Fatalf("%+v %v %v", state, known, err)
	}
	testkit.Disconnect(d, pg.RoleLifecycle)
	for era := int64(1); era <= 2; era++ { // twice is no harm
		state, err := schema.DeclareRestored(t.Context(), d.AdminURL(), "the disk was lost")
		if err != nil {
			t.Fatal(err)
		}
		if state.Era != era || !state.Active || !state.Declared || state.Since.IsZero() ||
			state.Reason != "the disk was lost" {
			t.Fatalf("%+v", state)
		}
	}
	var active bool
	var next int64
	if err := pool.QueryRow(t.Context(), `SELECT mesh.rolled_back(), mesh.next(7)`).Scan(&active, &next); err != nil ||
		!active || next != 2<<40 {
		t.Fatalf("%v %d %v", active, next, err)
	}
}

// A database that lacks the tables is brought up to date first, and its status is read without them.
func TestRollbackStatusOfAnOlderDatabase(t *testing.T) {
	testkit.IO(t)
	d := testkit.DB(t)
	if _, err := d.OwnerPool().Exec(t.Context(), `DROP FUNCTION mesh.raise_era_after_rollback(text), mesh.rolled_back();
		DROP TABLE recovery.rollback;
		DELETE FROM mesh.goose_db_version WHERE version_id >= 60`); err != nil {
		t.Fatal(err)
	}
	if _, known, err := schema.RollbackStatus(t.Context(), d.URL(pg.RoleOwner)); err != nil || known {
		t.Fatalf("%v %v", known, err)
	}
	if _, err := schema.DeclareRestored(t.Context(), d.URL(pg.RoleOwner), "x"); !errors.Is(err, pg.ErrNotMigrated) {
		t.Fatal(err)
	}
}

// Every service reads the mode; recovery alone raises the era, and only above the evidence that was reported while the
// mode is active.
func TestWhoMayUseRollbackMode(t *testing.T) {
	testkit.IO(t)
	d := testkit.DB(t)
	owner := connect(t, d.AdminURL())
	for _, role := range pg.ServiceRoles() {
		conn := connect(t, d.URL(role))
		if err := inRolledBack(t, conn, `SELECT mesh.rolled_back()`); testkit.IsPrivilege(err) != (role == pg.RoleSequencer) {
			t.Errorf("%s reads the mode: %v", role, err)
		}
		if err := inRolledBack(t, conn, `SELECT
			mesh.raise_era_after_rollback('x')`); testkit.IsPrivilege(err) != (role != pg.RoleRecovery) {
			t.Errorf("%s raises the era: %v", role, err)
		}
	}
	recovery := connect(t, d.URL(pg.RoleRecovery))
	for _, tt := range []struct {
		name, state string
		seen, want  int64
	}{
		{"without evidence", "active", -1, 0},
		{"outside of the mode", "none", 4, 0},
		{"above the evidence", "active", 4, 5},
		{"evidence of an earlier era", "active", 4, 5},
	} {
		if _, err := owner.Exec(t.Context(), `UPDATE recovery.rollback SET state = $1, since = now(), seen_era = $2`,
			tt.state, tt.seen); err != nil {
			t.Fatal(err)
		}
		var era int64
		if err := recovery.QueryRow(t.Context(), `SELECT mesh.raise_era_after_rollback('accepted')`).Scan(&era); err != nil ||
			era != tt.want {
			t.Errorf("%s: era %d, %v", tt.name, era, err)
		}
	}
}
