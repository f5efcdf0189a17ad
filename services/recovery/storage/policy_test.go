package storage_test

import (
	"context"
	"testing"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/recovery/storage"
)

// TestTheLimitIsThePolicys: with a key below the size of the database there is an incident though its volume has room,
// and with a key above it there is none.
func TestTheLimitIsThePolicys(t *testing.T) {
	testkit.IO(t)
	db := testkit.DB(t)
	values := map[string]string{}
	source := policy.NewSource(func(context.Context) (map[string]string, error) { return values, nil },
		testkit.Logger(t), policy.SourceConfig{})
	w := storage.Watch{
		DB: db.Pool(pg.RoleRecovery), Policy: source,
		Volume: "anywhere", Free: func(string) (int64, error) { return 1 << 40, nil },
	}
	for _, c := range []struct {
		mebibytes string
		open      int
	}{{"0", 0}, {"1", 1}, {"1000000", 0}} {
		values = map[string]string{policy.StorageLimitMebibytes: c.mebibytes}
		if err := source.Refresh(t.Context()); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Measure(t.Context()); err != nil {
			t.Fatal(err)
		}
		var open int
		if err := db.OwnerPool().QueryRow(t.Context(), `SELECT count(*) FROM recovery.incident
			WHERE kind = 'storage' AND closed_at IS NULL`).Scan(&open); err != nil || open != c.open {
			t.Errorf("a limit of %s MiB: %d incidents are open, want %d: %v", c.mebibytes, open, c.open, err)
		}
	}
}
