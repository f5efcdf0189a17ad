package main

import (
	"bytes"
	"context"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/testkit"
)

// migrate runs `gpuaas migrate` and returns the exit code and what it printed.
func migrate(t *testing.T, args ...string) (int, string, string) {
	t.Helper()
	var out, err bytes.Buffer
	code := execute(context.Background(), append([]string{"migrate"}, args...), strings.NewReader(""), &out, &err)
	return code, out.String(), err.String()
}

func TestMigrateRestored(t *testing.T) {
	testkit.IO(t)
	d := testkit.DB(t)
	url := filepath.Join(t.TempDir(), "owner")
	if err := pki.WriteFile(url, []byte(d.URL(pg.RoleOwner)+"\n")); err != nil {
		t.Fatal(err)
	}
	if code, _, err := migrate(t, "restored", "--database-url-file", url); code != 2 || !strings.Contains(err,
		"--reason TEXT") {
		t.Fatalf("%d %s", code, err)
	}
	if code, out, err := migrate(t, "status", "--database-url-file", url); code != 0 || !strings.Contains(out, "era: 0") ||
		!strings.Contains(out, "rollback mode: none") {
		t.Fatalf("%d %s %s", code, out, err)
	}
	// In a pipe one tab separates the fields, as in every list.
	_, listed, _ := migrate(t, "status", "--database-url-file", url)
	table, _, _ := strings.Cut(listed, "\n\n")
	for line := range strings.SplitSeq(table, "\n") {
		if strings.Count(line, "\t") != 2 || strings.Contains(line, "  ") {
			t.Errorf("a line of the list: %q", line)
		}
	}
	pool := d.Pool(pg.RoleRecovery)
	if err := pool.Ping(t.Context()); err != nil {
		t.Fatal(err)
	}
	code, _, err := migrate(t, "restored", "--database-url-file", url, "--reason", "the disk was lost")
	if code == 0 || !strings.Contains(err, "recovery (test recovery)") || !strings.Contains(err, "stop every service") {
		t.Fatalf("%d %s", code, err)
	}
	// The state that a restore of only some tables leaves.
	if _, err := d.OwnerPool().Exec(t.Context(),
		`INSERT INTO recovery.watch_count (placement, workspaces, units) VALUES ('process', 7, 7)`); err != nil {
		t.Fatal(err)
	}
	testkit.Disconnect(d, pg.RoleRecovery)
	code, out, err := migrate(t, "restored", "--database-url-file", url, "--reason", "the disk was lost")
	if code != 0 || !strings.Contains(out, "the era is 1 now") || !strings.Contains(out,
		"gpuaas rollback accept --reason TEXT") || !strings.Contains(out, "docs/restore.md") {
		t.Fatalf("%d %s %s", code, out, err)
	}
	if code, out, err = migrate(t, "status", "--database-url-file", url); code != 0 || !strings.Contains(out, "era: 1") ||
		!strings.Contains(out, "rollback mode: active since") {
		t.Fatalf("%d %s %s", code, out, err)
	}
	var counts int
	if err := d.OwnerPool().QueryRow(t.Context(), `SELECT count(*) FROM recovery.watch_count`).Scan(&counts); err != nil ||
		counts != 0 {
		t.Errorf("a fleet of nothing has %d counts after the restore: %v", counts, err)
	}
}

// Each command reports that the database cannot be reached, and the message does not contain the password.
func TestMigrateWithoutADatabase(t *testing.T) {
	testkit.IO(t)
	url := filepath.Join(t.TempDir(), "owner")
	if err := pki.WriteFile(url, []byte("postgres://owner:s3cret@127.0.0.1:1/gpuaas\n")); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{{"up"}, {"status"}, {"restored", "--reason", "a trial"}} {
		code, _, err := migrate(t, append(args, "--database-url-file", url)...)
		if code != 1 || !strings.HasPrefix(err, "error: unavailable: the database cannot be reached\n") ||
			strings.Contains(err, "s3cret") {
			t.Errorf("%v: %d %s", args, code, err)
		}
	}
}
