package recovery_test

import (
	"errors"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/recovery"
)

// Scenario: a replica starts, and the database ends its connection while the replica reads the configured profile. It
// reads the profile again and starts.
func TestAReplicaStartsThoughTheDatabaseHangsUp(t *testing.T) {
	m := start(t)
	admin, err := pgx.Connect(m.ctx, m.db.AdminURL())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = admin.Close(m.ctx) }()
	tx, err := m.db.OwnerPool().Begin(m.ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(m.ctx) }()
	if _, err := tx.Exec(m.ctx, `LOCK TABLE recovery.profile_name IN ACCESS EXCLUSIVE MODE`); err != nil {
		t.Fatal(err)
	}
	registry, err := obs.NewRegistry()
	if err != nil {
		t.Fatal(err)
	}
	started := make(chan error, 1)
	go func() {
		service, err := recovery.New(m.ctx, recovery.Deps{Logger: testkit.Logger(t), Registry: registry}, m.cfg)
		if err == nil {
			service.Close()
		}
		started <- err
	}()
	testkit.Eventually(t, testkit.Patience, func() error {
		var ended int
		err := admin.QueryRow(m.ctx, `
			SELECT count(*) FILTER (WHERE pg_terminate_backend(pid)) FROM pg_stat_activity
			WHERE datname = $1 AND wait_event_type = 'Lock' AND query LIKE '%n.configured%'`, m.db.Name()).Scan(&ended)
		if err == nil && ended == 0 {
			err = errors.New("no connection reads the configured profile")
		}
		return err
	})
	if err := tx.Rollback(m.ctx); err != nil {
		t.Fatal(err)
	}
	if err := <-started; err != nil {
		t.Errorf("the replica does not start: %v", err)
	}
}
