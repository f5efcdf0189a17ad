package pg_test

import (
	"strings"
	"testing"
	"time"

	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg/migrations"
	"github.com/gpuaas/mesh/internal/testkit"
)

// TestObservationsFromTheFutureAreDated: rows that a replica whose clock is ahead has written hide no later ones after
// the migration; rows of the past stay.
func TestObservationsFromTheFutureAreDated(t *testing.T) {
	testkit.IO(t)
	ctx, db := testkit.Context(t), testkit.DB(t)
	file, err := migrations.FS.ReadFile("00086_observation_versions.sql")
	if err != nil {
		t.Fatal(err)
	}
	up, _, _ := strings.Cut(string(file), "-- +goose Down")
	before := time.Now()
	future, past := ids.New(), ids.New()
	for workspace, at := range map[string]time.Time{future: before.Add(time.Hour), past: before.Add(-time.Hour)} {
		_, err := db.OwnerPool().Exec(ctx,
			`INSERT INTO readmodel.observed (workspace_id, node_id, version, body) VALUES ($1, $2, $3, '{}')`, workspace,
			ids.New(), at.UnixMicro())
		if err != nil {
			t.Fatal(err)
		}
	}
	if _, err := db.OwnerPool().Exec(ctx, up); err != nil {
		t.Fatal(err)
	}
	now, _, err := testkit.Clock(ctx, db.OwnerPool())
	if err != nil {
		t.Fatal(err)
	}
	version := func(workspace string) int64 {
		var v int64
		if err := db.OwnerPool().QueryRow(ctx, `SELECT version FROM readmodel.observed WHERE workspace_id = $1`,
			workspace).Scan(&v); err != nil {
			t.Fatal(err)
		}
		return v
	}
	if v := version(future); v > now.UnixMicro() || v < before.Add(-time.Minute).UnixMicro() {
		t.Errorf("the version from the future is %s, want now", time.UnixMicro(v).UTC())
	}
	if v := version(past); v != before.Add(-time.Hour).UnixMicro() {
		t.Errorf("the version from the past is %s, want it unchanged", time.UnixMicro(v).UTC())
	}
}
