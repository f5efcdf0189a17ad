package project_test

import (
	"slices"
	"testing"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/readmodel/project"
	"github.com/gpuaas/mesh/services/readmodel/project/projecttest"
)

const (
	kept = `SELECT coalesce(string_agg(format('%s: %s %s %s', tenant_id, workspaces, active, live_runs), ', '
		ORDER BY tenant_id), '')
		FROM readmodel.workspace_count WHERE (workspaces, active, live_runs) <> (0, 0, 0)`
	counted = `SELECT coalesce(string_agg(format('%s: %s %s %s', t, w, a, r), ', ' ORDER BY t), '') FROM (
		SELECT t, sum(w) AS w, sum(a) AS a, sum(r) AS r FROM (
			SELECT tenant_id AS t, 1 AS w, (state = 'active')::int AS a, 0 AS r FROM readmodel.workspace
				WHERE state <> 'decommissioned'
			UNION ALL SELECT coalesce(tenant_id, 'ffffffff-ffff-ffff-ffff-ffffffffffff'), 0, 0, 1 FROM readmodel.run
				WHERE live) x
		GROUP BY 1) y`
)

// TestCountsAreThoseOfTheRows: the stored counts equal those of the rows, after each change, after a change that was
// rolled back, and after a rebuild of a projection whose counts were wrong.
func TestCountsAreThoseOfTheRows(t *testing.T) {
	testkit.IO(t)
	ctx := testkit.Context(t)
	l := projecttest.New(t)
	p := l.Projector()
	check := func(after string) {
		t.Helper()
		if got, want := text(t, l, kept), text(t, l, counted); got != want {
			t.Errorf("after %s the counts are %q, want %q", after, got, want)
		}
	}
	tenants := []string{ids.New(), ids.New()}
	var list []*lifecyclev1.Workspace
	for n := range 6 {
		list = append(list, &lifecyclev1.Workspace{
			WorkspaceId: ids.New(), TenantId: tenants[n%2], Tenant: "alpha", Name: "w" + string(rune('a'+n)),
			State: commonv1.WorkspaceState_WORKSPACE_STATE_PROVISIONING, Epoch: 1,
		})
	}
	version := int64(1)
	change := func(of []*lifecyclev1.Workspace, state commonv1.WorkspaceState) {
		t.Helper()
		version++
		for _, w := range of {
			w.State = state
			l.AppendVersion(w, version)
		}
		l.Number()
		must(t, p.Drain(ctx))
		check(state.String())
	}
	change(list, commonv1.WorkspaceState_WORKSPACE_STATE_PROVISIONING)
	if text(t, l, kept) == "" {
		t.Error("workspaces stand and none is counted")
	}
	change(list[:4], commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE)
	change(list[1:3], commonv1.WorkspaceState_WORKSPACE_STATE_DECOMMISSIONED)
	run := &lifecyclev1.Run{
		RunId: ids.New(), WorkspaceId: list[0].GetWorkspaceId(), TenantId: tenants[0],
		State: commonv1.RunState_RUN_STATE_RUNNING,
	}
	l.AppendVersion(run, 1)
	l.Number()
	must(t, p.Drain(ctx))
	check("a run began")

	tx, err := l.DB.Pool(pg.RoleReadmodel).Begin(ctx)
	must(t, err)
	_, err = tx.Exec(ctx, `DELETE FROM readmodel.workspace`)
	must(t, err)
	must(t, tx.Rollback(ctx))
	check("a change that was rolled back")
	_, err = l.DB.Pool(pg.RoleReadmodel).Exec(ctx, `DELETE FROM readmodel.workspace WHERE workspace_id = $1`,
		list[5].GetWorkspaceId())
	must(t, err)
	check("a row went")

	run.State = commonv1.RunState_RUN_STATE_SUCCEEDED
	l.AppendVersion(run, 2)
	l.Number()
	must(t, p.Drain(ctx))
	check("the run ended")
	// Retention cuts rows as a role that has no right to write counts.
	_, err = l.DB.Pool(pg.RoleReadmodel).Exec(ctx, `UPDATE readmodel.workspace
		SET body = body || '{"state_at": "2020-01-01T00:00:00Z"}' WHERE state = 'decommissioned'`)
	must(t, err)
	_, err = l.DB.Pool(pg.RoleReadmodel).Exec(ctx, `UPDATE readmodel.run
		SET body = body || '{"finished_at": "2020-01-01T00:00:00Z"}' WHERE NOT live`)
	must(t, err)
	for table, rows := range map[string]string{"run": "1", "workspace": "2"} {
		sql := `SELECT cut::text FROM readmodel.cut_` + table + `s('0', '00000000-0000-0000-0000-000000000000', 500)`
		var cut string
		must(t, l.DB.Pool(pg.RoleReadmodel).QueryRow(ctx, sql).Scan(&cut))
		if cut != rows {
			t.Errorf("%s rows of %s were cut, want %s", cut, table, rows)
		}
	}
	check("a cut")
	_, err = l.DB.Pool(pg.RoleReadmodel).Exec(ctx, `UPDATE readmodel.workspace_count SET active = 77`)
	must(t, err)
	report, err := p.Verify(ctx)
	must(t, err)
	at := slices.IndexFunc(report.Differences, func(d project.Difference) bool { return d.Table == "workspace_count" })
	if at < 0 {
		t.Errorf("counts that are wrong are not among %+v", report.Differences)
	} else if d := report.Differences[at]; d.Missing != 2 || d.Surplus != 2 || !slices.Contains(tenants, d.Example) {
		t.Errorf("of counts that are wrong it says %+v", d)
	}
	_, err = p.Rebuild(ctx)
	must(t, err)
	check("a rebuild")
}

// TestCountsAreMadeAgainAfterACut: a rebuild of a log whose beginning was cut counts the rows that it keeps and those
// that it makes, and a check before it reports the difference.
func TestCountsAreMadeAgainAfterACut(t *testing.T) {
	testkit.IO(t)
	ctx := testkit.Context(t)
	l := projecttest.New(t)
	p := l.Projector()
	tenant := ids.New()
	var rows []version
	for n, state := range []commonv1.WorkspaceState{
		commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE, commonv1.WorkspaceState_WORKSPACE_STATE_PROVISIONING,
		commonv1.WorkspaceState_WORKSPACE_STATE_DECOMMISSIONED, commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE,
	} {
		w := &lifecyclev1.Workspace{
			WorkspaceId: ids.New(), TenantId: tenant, Tenant: "alpha", Name: "w" + string(rune('a'+n)), State: state, Epoch: 1,
		}
		l.AppendVersion(w, 4)
		if state != commonv1.WorkspaceState_WORKSPACE_STATE_DECOMMISSIONED {
			rows = append(rows, version{w, 4})
		}
	}
	l.Number()
	must(t, p.Drain(ctx))
	// The newest event is never cut.
	l.AppendVersion(&lifecyclev1.Tenant{TenantId: tenant, Name: "alpha"}, 5)
	l.Number()
	must(t, p.Drain(ctx))
	cutEvents(t, l)
	same := func(when string, want bool) {
		t.Helper()
		report, err := p.Verify(ctx)
		if err != nil || !report.Cut || report.Equal() != want {
			t.Errorf("a check %s: %+v, %v", when, report, err)
		}
	}
	same("after the cut", true)
	// One row is missing, and there is one that no owner announces.
	for sql, arg := range map[string]string{
		`DELETE FROM readmodel.workspace
			WHERE workspace_id = $1`: rows[0].m.(*lifecyclev1.Workspace).GetWorkspaceId(),
		`UPDATE readmodel.workspace_count SET workspaces = workspaces + 5 WHERE tenant_id = $1`: tenant,
	} {
		_, err := l.DB.Pool(pg.RoleReadmodel).Exec(ctx, sql, arg)
		must(t, err)
	}
	same("of wrong counts", false)
	owner := &fakeOwner{log: l, projector: p, midway: func() {}, rows: rows[:2]}
	report, err := p.Rebuild(ctx, owner)
	must(t, err)
	if !report.Cut {
		t.Errorf("the rebuild reports %+v", report)
	}
	if got, want := text(t, l, kept), tenant+": 2 1 0"; got != want || text(t, l, counted) != want {
		t.Errorf("after the rebuild the counts are %q, want %q", got, want)
	}
	same("after the rebuild", true)
}
