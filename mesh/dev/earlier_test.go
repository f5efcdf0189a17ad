package dev_test

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/devstack/pgserver"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	settings "github.com/gpuaas/mesh/internal/config"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pg/migrations"
	"github.com/gpuaas/mesh/internal/pg/schema"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/mesh/material"
	"github.com/gpuaas/mesh/mesh/meshtest"
)

// testdata has all rows of a `gpuaas dev` of build 6ab6b95, whose newest migration has the number earlierMigration. It
// was killed some minutes before earlierNow, when n1 was away. Of its workspaces demo has an instance of its second
// epoch, healthy and stuck are on n1, gone was decommissioned, broken was cancelled, and stuck is being recreated: its
// run waits for a task that n1 has. n2 is fenced, n3 is held, and spare has a token that was not used. The incident is
// that n1 cannot be reached.
const (
	earlierBuild     = "6ab6b95"
	earlierMigration = "00053"
	earlierNow       = "2026-11-28 14:05:00+00"
	earlierStuckRun  = "01a22275-6ae1-7e06-8c85-350fa7361a2a"
	earlierTask      = "01a22275-6afb-7dfe-86a0-71a6f1173f95"
)

// TestADatabaseOfAnEarlierBuildGoesOn starts a mesh on the database of an earlier build: nothing in it is lost, its
// open run and its open task go on, and no check of this build finds anything wrong with the rows.
func TestADatabaseOfAnEarlierBuildGoesOn(t *testing.T) {
	testkit.IO(t)
	cfg := config(t)
	cfg.Nodes, cfg.DataDir = 0, filepath.Join(meshtest.Dir(t), "data")
	cfg.PolicyFile = filepath.Join(t.TempDir(), "policy.yaml")
	if err := os.WriteFile(cfg.PolicyFile, []byte("node.task_stale_sweep_interval_seconds: 1\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	rows := earlierDatabase(t, filepath.Join(cfg.DataDir, "postgres"))
	launched, err := os.ReadFile(filepath.Join("testdata", earlierBuild+".launches.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	placement := filepath.Join(cfg.DataDir, "placement")
	if err := errors.Join(os.MkdirAll(placement, 0o711),
		os.WriteFile(filepath.Join(placement, "launches.jsonl"), launched, 0o600)); err != nil {
		t.Fatal(err)
	}
	s := start(t, cfg)
	earlierIsShown(t, s)
	earlierGoesOn(t, s)
	earlierIsSound(t, s)
	earlierIsWhole(t, s, rows)
}

// earlierIsShown checks that people see what they saw.
func earlierIsShown(t *testing.T, s started) {
	t.Helper()
	ctx, query := t.Context(), s.Client().Query
	workspaces, err := query.ListWorkspaces(ctx, &readmodelv1.ListWorkspacesRequest{})
	if err != nil {
		t.Fatal(err)
	}
	shown := map[string]string{}
	for _, w := range workspaces.GetItems() {
		shown[w.GetName()] = fmt.Sprintf("%s, epoch %d", names.Of(w.GetState()), w.GetEpoch())
	}
	nodes, err := query.ListNodes(ctx, &readmodelv1.ListNodesRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range nodes.GetItems() {
		shown[n.GetName()] = names.Of(n.GetIdentity().GetState())
	}
	incidents, err := s.Client().Incidents.ListIncidents(ctx, &readmodelv1.ListIncidentsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for _, i := range incidents.GetItems() {
		shown[names.Of(i.GetKind())] = fmt.Sprintf("%d workspaces", len(i.GetWorkspaceIds()))
	}
	want := map[string]string{
		"demo": "active, epoch 2", "healthy": "active, epoch 1", "gone": "decommissioned, epoch 2",
		"broken": "failed, epoch 1", "stuck": "recreating, epoch 2",
		"n1": "active", "n2": "fenced", "n3": "held", "spare": "pending", "box-8e04d1c8273d-2": "active",
		"machine_unreachable": "1 workspaces",
	}
	if diff := cmp.Diff(want, shown); diff != "" {
		t.Errorf("shown (-want +got):\n%s", diff)
	}
}

// earlierGoesOn checks that the open task ends, and that the driver leases the open run, whose step last reported
// minutes ago.
func earlierGoesOn(t *testing.T, s started) {
	t.Helper()
	ctx, query := t.Context(), s.Client().Query
	testkit.Eventually(t, testkit.Patience, func() error {
		task, err := query.GetTask(ctx, &readmodelv1.GetTaskRequest{TaskId: earlierTask})
		if err != nil {
			return err
		}
		if got := task.GetTask().GetState(); got != commonv1.TaskState_TASK_STATE_OUTCOME_UNKNOWN {
			return fmt.Errorf("the open task is %s", names.Of(got))
		}
		line, err := query.GetTimeline(ctx, &readmodelv1.GetTimelineRequest{Workspace: "acme/stuck"})
		if err != nil {
			return err
		}
		for _, item := range line.GetItems() {
			if item.GetRunId() == earlierStuckRun && item.GetState() == commonv1.AttemptState_ATTEMPT_STATE_WAITING &&
				item.GetHeartbeatAgeSeconds() < testkit.Patience.Seconds() {
				return nil
			}
		}
		return fmt.Errorf("the open run is not driven: %v", line.GetItems())
	})
}

// earlierIsSound checks that a first round of each check finds nothing wrong with the rows.
func earlierIsSound(t *testing.T, s started) {
	t.Helper()
	ctx := t.Context()
	testkit.Eventually(t, testkit.Patience, func() error {
		return errors.Join(ran(s, "findings"), ran(s, "two_instances"), ran(s, "retention"))
	})
	found, err := s.Client().Findings.ListFindings(ctx, &readmodelv1.ListFindingsRequest{IncludeResolved: true})
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range found.GetItems() {
		t.Errorf("found: %v", f)
	}
	audit, err := s.Client().Audit.VerifyAudit(ctx, &readmodelv1.VerifyAuditRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if !audit.GetIntact() || audit.GetSigned() == 0 {
		t.Errorf("the audit log: %v", audit)
	}
	kept, err := s.Client().Retention.GetRetention(ctx, &readmodelv1.GetRetentionRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range kept.GetCuts() {
		if c.GetRows() != 0 {
			t.Errorf("cut: %v", c)
		}
	}
	compare := func() []string {
		got, err := s.Client().Projections.VerifyProjections(ctx, &readmodelv1.VerifyProjectionsRequest{})
		if err != nil {
			t.Fatal(err)
		}
		var out []string
		for _, d := range got.GetDifferences() {
			out = append(out, fmt.Sprintf("%s: %d missing, %d surplus", d.GetTable(), d.GetMissing(), d.GetSurplus()))
		}
		return out
	}
	// The earlier build kept only the newest observation of a workspace: that of the ended instance of demo is missing.
	if diff := cmp.Diff([]string{"observed: 1 missing, 0 surplus"}, compare()); diff != "" {
		t.Errorf("projections differ (-want +got):\n%s", diff)
	}
	if _, err := s.Client().Projections.RebuildProjections(ctx, &readmodelv1.RebuildProjectionsRequest{}); err != nil {
		t.Fatal(err)
	}
	if differing := compare(); differing != nil {
		t.Errorf("projections that were made anew differ: %s", differing)
	}
}

// ran returns an error until a job has run.
func ran(s started, job string) error {
	families, err := s.Registry().Gatherer().Gather()
	if err != nil {
		return err
	}
	for _, f := range families {
		if !strings.HasSuffix(f.GetName(), "background_runs_total") {
			continue
		}
		for _, m := range f.GetMetric() {
			labels := map[string]string{}
			for _, l := range m.GetLabel() {
				labels[l.GetName()] = l.GetValue()
			}
			if labels["job"] == job && labels["outcome"] == "done" && m.GetCounter().GetValue() > 0 {
				return nil
			}
		}
	}
	return fmt.Errorf("%s has not run", job)
}

// emptied are the tables of the earlier build that a migration empties or drops.
var emptied = []string{"lifecycle.observed_workload", "lifecycle.row_witness"}

// earlierIsWhole checks that no other table has fewer rows than the earlier build left.
func earlierIsWhole(t *testing.T, s started, rows map[string]int) {
	t.Helper()
	url, err := settings.SecretFile(material.Layout{Dir: filepath.Join(s.Dir(), "material")}.URLFile(pg.RoleOwner)).Read()
	if err != nil {
		t.Fatal(err)
	}
	conn, err := pgx.Connect(t.Context(), url.Reveal())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close(context.WithoutCancel(t.Context())) }()
	for table, had := range rows {
		if strings.HasPrefix(table, "events.") || slices.Contains(emptied, table) {
			continue // the owner may not read events
		}
		var has int
		if err := conn.QueryRow(t.Context(), "SELECT count(*) FROM "+table).Scan(&has); err != nil || has < had {
			t.Errorf("%s had %d rows and has %d: %v", table, had, has, err)
		}
	}
}

// earlierDatabase makes dir the directory of a Postgres with the rows of the earlier build, migrated to this one, and
// returns how many rows each table had. The clock of its mesh goes on from the time at which the earlier build ended.
func earlierDatabase(t *testing.T, dir string) map[string]int {
	t.Helper()
	ctx := testkit.Context(t)
	server, err := pgserver.Start(ctx, pgserver.Config{Dir: dir, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := server.Stop(context.WithoutCancel(ctx)); err != nil {
			t.Error(err)
		}
	}()
	passwords := map[string]string{}
	for _, role := range append(pg.Roles(), pg.RoleOwner) {
		passwords[role] = rand.Text()
	}
	err = schema.Provision(ctx, server.AdminURL(), schema.Provisioning{Passwords: passwords, Exclusive: true})
	if err != nil {
		t.Fatal(err)
	}
	owner := server.URL(pg.DatabaseMesh, pg.RoleOwner, passwords[pg.RoleOwner])
	if _, err := schema.Migrate(ctx, owner, schema.MigrateOptions{Files: earlierFiles(t)}); err != nil {
		t.Fatal(err)
	}
	admin, err := pgx.ParseConfig(server.AdminURL())
	if err != nil {
		t.Fatal(err)
	}
	admin.Database = pg.DatabaseMesh
	conn, err := pgx.ConnectConfig(ctx, admin)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	rows := loadEarlier(t, conn)
	if _, err := schema.Migrate(ctx, owner, schema.MigrateOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Exec(ctx, `DO $$ BEGIN
		EXECUTE format('CREATE OR REPLACE FUNCTION mesh.clock() RETURNS timestamptz LANGUAGE sql STABLE PARALLEL SAFE
			AS $f$SELECT clock_timestamp() - interval %L$f$', clock_timestamp() - timestamptz '`+earlierNow+`');
	END $$`); err != nil {
		t.Fatal(err)
	}
	return rows
}

func earlierFiles(t *testing.T) fs.FS {
	t.Helper()
	all, err := fs.Glob(migrations.FS, "*.sql")
	if err != nil {
		t.Fatal(err)
	}
	out := fstest.MapFS{}
	for _, name := range all {
		if name[:5] > earlierMigration {
			continue
		}
		data, err := fs.ReadFile(migrations.FS, name)
		if err != nil {
			t.Fatal(err)
		}
		out[name] = &fstest.MapFile{Data: data}
	}
	return out
}

// loadEarlier replaces the rows of the database by those in testdata, which are in the format of pg_dump, and returns
// how many each table has. Their transactions count as ended long ago.
func loadEarlier(t *testing.T, conn *pgx.Conn) map[string]int {
	t.Helper()
	ctx := t.Context()
	file, err := os.Open(filepath.Join("testdata", earlierBuild+".sql.gz"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = file.Close() }()
	plain, err := gzip.NewReader(file)
	if err != nil {
		t.Fatal(err)
	}
	exec := func(sql string) {
		t.Helper()
		if _, err := conn.Exec(ctx, sql); err != nil {
			t.Fatalf("%s: %v", sql, err)
		}
	}
	exec(`SET session_replication_role = replica`) // no triggers, no foreign keys
	exec(`DO $$ DECLARE tab regclass; BEGIN
		FOR tab IN SELECT c.oid FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
			WHERE c.relkind = 'r' AND c.relname !~ '^(goose|river)_' AND n.nspname IN ('events', 'lifecycle', 'mesh', 'nodeapi',
				'readmodel', 'recovery')
		LOOP
			EXECUTE format('DELETE FROM %s', tab);
		END LOOP;
	END $$`)
	rows := map[string]int{}
	var copying string
	var data bytes.Buffer
	for lines := bufio.NewReader(plain); ; {
		line, err := lines.ReadString('\n')
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		switch {
		case copying == "" && strings.HasPrefix(line, "COPY "):
			copying = strings.TrimSuffix(strings.TrimSpace(line), ";")
		case copying == "":
			exec(line)
		case line == "\\.\n":
			tag, err := conn.PgConn().CopyFrom(ctx, &data, copying)
			if err != nil {
				t.Fatalf("%s: %v", copying, err)
			}
			rows[strings.Fields(copying)[1]] = int(tag.RowsAffected())
			copying = ""
			data.Reset()
		default:
			data.WriteString(line)
		}
	}
	exec(`UPDATE events.event SET xid = '3'`)
	exec(`UPDATE events.numbered SET xid = '3', oldest = '3'`)
	exec(`RESET session_replication_role`)
	return rows
}
