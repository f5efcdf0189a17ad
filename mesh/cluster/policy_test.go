package cluster

import (
	"log/slog"
	"testing"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/internal/policy/policystore"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/mesh/material"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// Scenario: the database of a cluster is restored from a backup. In rollback mode the cluster starts with the values
// that are stored; after the acceptance it starts with those of its configuration.
func TestThePolicyWaitsForTheAcceptance(t *testing.T) {
	testkit.IO(t)
	ctx := testkit.Context(t)
	db := testkit.DB(t)
	c := &Cluster{
		cfg: Config{Policy: map[string]string{policy.SagaRetryLimit: "4"}}, logger: slog.New(slog.DiscardHandler),
		Material: &material.Material{Layout: material.Layout{Dir: t.TempDir()}},
	}
	file := c.Material.URLFile(pg.RoleRecovery)
	if err := pki.WriteFile(file, []byte(db.URL(pg.RoleRecovery))); err != nil {
		t.Fatal(err)
	}
	stored := func() int {
		t.Helper()
		rows, err := policystore.List(ctx, db.Pool(pg.RoleRecovery))
		if err != nil {
			t.Fatal(err)
		}
		return len(rows)
	}
	testkit.SetRollback(db, true)
	if err := c.setPolicy(ctx); err != nil || stored() != 0 {
		t.Errorf("in rollback mode %d values are stored: %v", stored(), err)
	}
	testkit.SetRollback(db, false)
	if err := c.setPolicy(ctx); err != nil || stored() != 1 {
		t.Errorf("after the acceptance %d values are stored: %v", stored(), err)
	}
}
