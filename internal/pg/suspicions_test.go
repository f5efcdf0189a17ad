package pg_test

import (
	"strings"
	"testing"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pg/migrations"
	"github.com/gpuaas/mesh/internal/testkit"
)

// Scenario: a database of an earlier build has suspicions, one for all detectors, when it migrates. They keep their
// source, their time and their count, another detector gets one beside it, and the way back leaves the older one.
func TestSuspicionsAreKeptWhenTheyGetASource(t *testing.T) {
	testkit.IO(t)
	file, err := migrations.FS.ReadFile("00241_suspicions_by_source.sql")
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
	suspect := func(source, since string, scans int) error {
		_, err := d.Pool(pg.RoleLifecycle).Exec(ctx, `
			INSERT INTO lifecycle.suspicion (kind, subject_type, subject_id, source, since, looks)
			VALUES ('node_occupied_without_allocation', 'node', 'one', $1, $2::timestamptz, $3)`, source, since, scans)
		return err
	}
	stand := func() string {
		t.Helper()
		var out string
		err := d.Pool(pg.RoleLifecycle).QueryRow(ctx, `
			SELECT coalesce(string_agg(format('%s %s %s', s.source, extract(epoch FROM s.since)::int, s.looks), ', '
				ORDER BY s.source), '')
			FROM lifecycle.suspicion s`).Scan(&out)
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	migrate(down)
	if err := suspect("records", "1970-01-01 00:00:10Z", 7); err != nil {
		t.Fatal(err)
	}
	if err := suspect("agents", "1970-01-01 00:00:20Z", 1); err == nil {
		t.Fatal("a database of the build before has two suspicions of one subject, and this shows nothing")
	}
	migrate(up)
	if got := stand(); got != "records 10 7" {
		t.Errorf("after the migration: %s", got)
	}
	if err := suspect("agents", "1970-01-01 00:00:20Z", 1); err != nil {
		t.Fatal(err)
	}
	if got := stand(); got != "agents 20 1, records 10 7" {
		t.Errorf("with a second detector: %s", got)
	}
	migrate(down)
	if got := stand(); got != "records 10 7" {
		t.Errorf("after the way back: %s", got)
	}
	migrate(up)
}
