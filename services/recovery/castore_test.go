package recovery_test

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"testing"

	"github.com/gpuaas/mesh/internal/config"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/retention"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/recovery"
)

// The rows of the authority's own database have a term, and an account that `gpuaas retention status` shows.
func TestAuthoritysDatabaseHasATerm(t *testing.T) {
	testkit.IO(t)
	other := testkit.DB(t)
	t.Cleanup(func() {
		// The role is of the whole server.
		admin, err := pg.Open(context.WithoutCancel(t.Context()), pg.Config{URL: other.AdminURL()})
		if err != nil {
			t.Fatal(err)
		}
		defer admin.Close()
		if _, err := admin.Exec(context.WithoutCancel(t.Context()), `DO $$
			DECLARE name text := 'mesh_ca_retention_' || oid FROM pg_database WHERE datname = current_database();
			BEGIN
				EXECUTE format('DROP OWNED BY %1$I CASCADE; DROP ROLE %1$I', name);
			END $$`); err != nil {
			t.Error(err)
		}
	})
	m := start(t, func(cfg *recovery.Config) {
		cfg.CADatabaseURLFile = config.SecretFile(write(t, filepath.Join(t.TempDir(), "ca-db"), other.AdminURL()))
	})
	pool := m.db.Pool(pg.RoleReadmodel)
	testkit.Eventually(t, testkit.Patience, func() error {
		accounts, err := retention.Accounts(m.ctx, pool)
		if err != nil {
			return err
		}
		i := slices.IndexFunc(accounts, func(a retention.Account) bool { return a.Cut == "authority_tokens" })
		if i < 0 || accounts[i].DoneAt == nil || accounts[i].Failure != "" {
			return fmt.Errorf("of %d accounts, none of a walk over the authority's tokens that has ended", len(accounts))
		}
		return nil
	})
}
