package lifecycle

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"pgregory.net/rapid"

	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/retention"
	"github.com/gpuaas/mesh/internal/testkit"
)

// life is what one workspace of a test has left behind: the states of its rows.
type life struct {
	workspace, run, task, claim, allocation, instance string
	age                                               time.Duration // of each row's end
	of                                                map[string]string
}

// insert writes the rows of a life as the product does, an age ago.
func (l *life) insert(ctx context.Context, db *pgxpool.Pool) error {
	l.of = map[string]string{}
	for _, name := range []string{"tenant", "workspace", "run", "task", "claim", "allocation", "instance", "node"} {
		l.of[name] = ids.New()
	}
	age := l.age.Seconds()
	for _, s := range []struct {
		sql  string
		args []any
	}{
		{`INSERT INTO lifecycle.tenant (id, name) VALUES ($1, $1::uuid::text)`, []any{l.of["tenant"]}},
		{
			`INSERT INTO lifecycle.workspace (id, tenant_id, name, state, epoch, run_id, state_at)
			VALUES ($1, $2, 'w', $3, 2, $4, mesh.clock() - make_interval(secs => $5))`,
			[]any{l.of["workspace"], l.of["tenant"], l.workspace, l.of["run"], age},
		},
		{
			`INSERT INTO lifecycle.saga_run (id, workspace_id, tenant_id, kind, definition, def_version, step_names, epoch,
				state, why_waiting, stuck_reason, finished_at)
			VALUES ($1, $2, $3, 'create', 'd', 1, '{a}', 1, $4, 'w', 's',
				CASE WHEN $4 IN ('succeeded', 'failed') THEN mesh.clock() - make_interval(secs => $5) END)`,
			[]any{l.of["run"], l.of["workspace"], l.of["tenant"], l.run, age},
		},
		{
			`INSERT INTO lifecycle.saga_step (run_id, step, name, dir, attempt, workspace_id, tenant_id, fence, op_seq, state,
				idem_key, stall_after)
			VALUES ($1, 0, 'a', 'do', 1, $2, $3, 1, 1, 'succeeded', 'k', '1 minute')`,
			[]any{l.of["run"], l.of["workspace"], l.of["tenant"]},
		},
		{
			`INSERT INTO lifecycle.task (task_id, type, node_id, workspace_id, run_id, state, idem_key, payload, expires_at,
				state_at)
			VALUES ($1, 'probe.noop', $2, $3, $4, $5, $1::uuid::text, '', mesh.clock(),
				mesh.clock() - make_interval(secs => $6))`,
			[]any{l.of["task"], l.of["node"], l.of["workspace"], l.of["run"], l.task, age},
		},
		{
			`INSERT INTO lifecycle.late_evidence (task_id, attempt, node_id, session_epoch, state)
				VALUES ($1, 1, $2, 1, 'succeeded')`,
			[]any{l.of["task"], l.of["node"]},
		},
		{
			`INSERT INTO lifecycle.resource_claim (id, workspace_id, tenant_id, run_id, step, kind, scope, deterministic_name,
				epoch, orphaned_at, released_at)
			VALUES ($1, $2, $3, $4, 0, 'storage', 'shared', 'n', 1, CASE WHEN $5 = 'orphaned'
				THEN mesh.clock() - make_interval(secs => $6) END,
				CASE WHEN $5 = 'released' THEN mesh.clock() - make_interval(secs => $6) END)`,
			[]any{l.of["claim"], l.of["workspace"], l.of["tenant"], l.of["run"], l.claim, age},
		},
		{
			`INSERT INTO lifecycle.allocation (allocation_id, workspace_id, tenant_id, epoch, state, placement, occupancy,
				state_at)
			VALUES ($1, $2, $3, 1, $4, 'process', CASE WHEN $4 = 'released' THEN 'none' ELSE 'cleanup'
				END, mesh.clock() - make_interval(secs => $5))`,
			[]any{l.of["allocation"], l.of["workspace"], l.of["tenant"], l.allocation, age},
		},
		{
			`INSERT INTO lifecycle.instance (instance_id, workspace_id, tenant_id, epoch, state, placement, ended_at)
			VALUES ($1, $2, $3, 1, $4, 'process', CASE WHEN $4 = 'ended' THEN mesh.clock() - make_interval(secs => $5) END)`,
			[]any{l.of["instance"], l.of["workspace"], l.of["tenant"], l.instance, age},
		},
		{`INSERT INTO lifecycle.operation_key (tenant_id, key, digest, run_id, created_at)
			VALUES ($1, 'k', 'd', $2, mesh.clock() - make_interval(secs => $3))`, []any{l.of["tenant"], l.of["run"], age}},
	} {
		if _, err := db.Exec(ctx, s.sql, s.args...); err != nil {
			return err
		}
	}
	return nil
}

// rowsOf are the tables of a life, with the column of its id and its name.
var rowsOf = []struct{ table, column, name string }{
	{"workspace", "id", "workspace"},
	{"saga_run", "id", "run"},
	{"saga_step", "run_id", "run"},
	{"task", "task_id", "task"},
	{"late_evidence", "task_id", "task"},
	{"resource_claim", "id", "claim"},
	{"allocation", "allocation_id", "allocation"},
	{"instance", "instance_id", "instance"},
	{"operation_key", "run_id", "run"},
}

// left returns the tables that still have a row of the life.
func (l *life) left(ctx context.Context, db *pgxpool.Pool) ([]string, error) {
	var out []string
	for _, r := range rowsOf {
		var there bool
		err := db.QueryRow(ctx, `SELECT EXISTS (SELECT FROM lifecycle.`+r.table+` WHERE `+r.column+` = $1)`,
			l.of[r.name]).Scan(&there)
		if err != nil {
			return nil, err
		}
		if there {
			out = append(out, r.table)
		}
	}
	return out, nil
}

// open returns the tables whose row of this life must stay, whatever the term.
func (l *life) open() []string {
	var out []string
	live := !slices.Contains([]string{"succeeded", "failed"}, l.run)
	if live { // and whatever it may ask for
		return []string{
			"workspace", "saga_run", "saga_step", "task", "late_evidence", "resource_claim", "allocation",
			"instance", "operation_key",
		}
	}
	if l.workspace != "decommissioned" {
		out = append(out, "workspace", "saga_run", "saga_step")
	}
	if slices.Contains([]string{"queued", "dispatched", "delivered", "running"}, l.task) {
		out = append(out, "task", "late_evidence")
	}
	if l.claim != "released" {
		out = append(out, "workspace", "saga_run", "saga_step", "resource_claim")
	}
	if l.allocation != "released" {
		out = append(out, "workspace", "allocation")
	}
	if l.instance != "ended" {
		out = append(out, "workspace", "instance")
	}
	return out
}

func walk(ctx context.Context, db *pgxpool.Pool, term time.Duration) error {
	for _, c := range cuts {
		after := "00000000-0000-0000-0000-000000000000"
		for {
			done, err := pg.One[retention.Batch](ctx, db, c.Statement, term.Seconds(), after, 100)
			if err != nil {
				return err
			}
			if done.Next == nil {
				break
			}
			after = *done.Next
		}
	}
	return nil
}

// TestNoTermCutsWhatIsOpen: whatever the states and the term, an open run with every row that it may read, a live claim
// and an open task stay, rows younger than the term stay, and ended rows older than it are deleted.
func TestNoTermCutsWhatIsOpen(t *testing.T) {
	testkit.IO(t)
	db := testkit.DB(t)
	pool := db.Pool(pg.RoleLifecycle)
	testkit.SetClockOffset(db, 1000*time.Hour)
	oneOf := func(rt *rapid.T, what string, of ...string) string { return rapid.SampledFrom(of).Draw(rt, what) }
	rapid.Check(t, func(rt *rapid.T) {
		ctx := t.Context()
		l := &life{
			workspace: oneOf(rt, "workspace", "active", "failed", "stuck", "decommissioned", "decommissioned",
				"decommissioned"),
			run: oneOf(rt, "run", "pending", "running", "waiting", "compensating", "stuck", "failed", "succeeded",
				"succeeded", "succeeded"),
			task: oneOf(rt, "task", "queued", "dispatched", "delivered", "running", "succeeded", "expired",
				"outcome_unknown", "cancelled"),
			claim:      oneOf(rt, "claim", "intended", "orphaned", "released", "released"),
			allocation: oneOf(rt, "allocation", "active", "release_failed", "released", "released"),
			instance:   oneOf(rt, "instance", "live", "ending", "ended", "ended"),
			age:        time.Duration(rapid.IntRange(0, 100).Draw(rt, "age")) * time.Hour,
		}
		term := time.Duration(rapid.IntRange(0, 100).Draw(rt, "term"))*time.Hour + 30*time.Minute
		if err := l.insert(ctx, pool); err != nil {
			rt.Fatal(err)
		}
		if err := walk(ctx, pool, term); err != nil {
			rt.Fatal(err)
		}
		left, err := l.left(ctx, pool)
		if err != nil {
			rt.Fatal(err)
		}
		open := l.open()
		for _, r := range rowsOf {
			stays := slices.Contains(left, r.table)
			switch {
			case !stays && (slices.Contains(open, r.table) || l.age < term):
				rt.Errorf("%+v, term %s: the row of %s was cut", l, term, r.table)
			case stays && !slices.Contains(open, r.table) && l.age > term:
				rt.Errorf("%+v, term %s: the row of %s is left", l, term, r.table)
			}
		}
		var evidence int
		if err := pool.QueryRow(ctx, `SELECT count(*) FROM lifecycle.row_evidence`).Scan(&evidence); err != nil ||
			evidence != 0 {
			rt.Errorf("%d pieces of evidence of changes by hand, %v", evidence, err)
		}
	})
}
