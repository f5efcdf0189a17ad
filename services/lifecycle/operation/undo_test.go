package operation

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/provision"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
)

// failing is one way in which a recreate fails for good at a step.
type failing struct {
	step string
	// begin makes the step fail, or wait until the recreate is cancelled.
	begin  func(p *cluster, name string)
	cancel bool
	end    func(p *cluster, name string)
}

func refusing(kind string) func(*cluster, string) {
	return func(p *cluster, _ string) {
		p.world.mu.Lock()
		defer p.world.mu.Unlock()
		p.world.refuse, p.world.reason = kind, commonv1.Reason_REASON_UNSPECIFIED
		if kind != "" {
			p.world.reason = commonv1.Reason_REASON_INVALID_ARGUMENT
		}
	}
}

func with(change func(w *world)) func(*cluster, string) {
	return func(p *cluster, _ string) {
		p.world.mu.Lock()
		defer p.world.mu.Unlock()
		change(p.world)
	}
}

// failures lists a failure of each step of a recreate.
func failures() []failing {
	const forbid = `CREATE FUNCTION lifecycle.forbid() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION
		'no handles now'; END $$;
		CREATE TRIGGER forbid BEFORE INSERT OR UPDATE ON lifecycle.workspace_handle
			FOR EACH ROW EXECUTE FUNCTION lifecycle.forbid()`
	owner := func(sql string) func(*cluster, string) {
		return func(p *cluster, _ string) {
			if _, err := p.db.OwnerPool().Exec(p.t.Context(), sql); err != nil {
				p.t.Fatal(err)
			}
		}
	}
	tenant := func(sql string) func(*cluster, string) {
		return func(p *cluster, name string) {
			p.schemas(strings.ReplaceAll(sql, "{schema}", pgx.Identifier{name}.Sanitize()))
		}
	}
	return []failing{
		{step: provision.StepStorage, begin: refusing("storage.allocate"), end: refusing("")},
		{step: provision.StepHandle, begin: owner(forbid), end: owner(`DROP FUNCTION lifecycle.forbid() CASCADE`)},
		{
			step: provision.StepSchema, cancel: true, begin: tenant(`ALTER TABLE {schema}.workspace_info RENAME TO hidden`),
			end: tenant(`ALTER TABLE {schema}.hidden RENAME TO workspace_info`),
		},
		{step: provision.StepDeploy, begin: refusing("workload.deploy"), end: refusing("")},
		{
			step: provision.StepReady, cancel: true, begin: with(func(w *world) { w.unready = true }),
			end: with(func(w *world) { w.unready = false }),
		},
	}
}

// comesTo waits until the open run of a workspace is at a step and has made an attempt there that did not end the step.
func (p *cluster) comesTo(id, step string) {
	p.t.Helper()
	testkit.Eventually(p.t, testkit.Patience, func() error {
		run, open, err := runs.Live(testkit.Context(p.t), p.db.Pool(pg.RoleLifecycle), id)
		if err != nil {
			return err
		}
		if !open || run.StepName() != step || run.WhyWaiting == "" {
			return fmt.Errorf("the run is at %q: %s", run.StepName(), run.WhyWaiting)
		}
		return nil
	})
}

// keeps fails the test unless the rows of the tenant are kept, and nothing else is claimed.
func (p *cluster) keeps(id, name string) {
	p.t.Helper()
	var rows int
	quoted := pgx.Identifier{name}.Sanitize()
	err := pg.InTx(p.t.Context(), p.workloads(), func(ctx context.Context, tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `GRANT `+quoted+` TO CURRENT_USER`); err != nil {
			return err
		}
		if err := tx.QueryRow(ctx, `SELECT count(*) FROM `+quoted+`.mine`).Scan(&rows); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, `REVOKE `+quoted+` FROM CURRENT_USER`)
		return err
	})
	if err != nil || rows != 3 {
		p.t.Errorf("of the tenant's 3 rows %d are left: %v", rows, err)
	}
	if role, login, schema := p.mayLogIn(p.admin(), id); !role || login || !schema {
		p.t.Errorf("the role stands: %v and may log in: %v, the schema: %v", role, login, schema)
	}
	n := p.count(`SELECT count(*) FROM lifecycle.resource_claim WHERE workspace_id = $1 AND released_at IS NULL`, id)
	confirmed := p.count(`SELECT count(*) FROM lifecycle.resource_claim WHERE workspace_id = $1 AND kind = 'schema'
		AND confirmed_at IS NOT NULL AND released_at IS NULL AND orphaned_at IS NULL`, id)
	if n != 1 || confirmed != 1 {
		p.t.Errorf("%d claims are live, %d of them on the schema", n, confirmed)
	}
}

// TestAFailedRecreateKeepsTheSchema: with the tenant's data, whichever step the recreate fails at; a later recreate or
// retry has the same data.
func TestAFailedRecreateKeepsTheSchema(t *testing.T) {
	for n, f := range failures() {
		t.Run(f.step, func(t *testing.T) {
			p, id, name, _ := tenantOf(t)
			f.begin(p, name)
			if _, err := p.seats[0].ask(t.Context(), kRecreate, id); err != nil {
				t.Fatal(err)
			}
			if f.cancel {
				p.comesTo(id, f.step)
				if _, err := p.seats[0].ask(t.Context(), kCancel, id); err != nil {
					t.Fatal(err)
				}
			}
			p.rests(id, "failed")
			if f.step == provision.StepStorage || f.step == provision.StepHandle {
				// The run has not reached the schema step, and leaves the login of the schema's role as it is.
				p.schemas(`ALTER ROLE ` + pgx.Identifier{name}.Sanitize() + ` NOLOGIN`)
			}
			p.keeps(id, name)
			if got := p.world.standing(); len(got) != 0 {
				t.Errorf("there stand %q", got)
			}
			f.end(p, name)
			if n%2 == 0 {
				p.recreated(id)
			} else {
				p.retried(id)
			}
			p.hasItsRows(id)
			if _, err := p.seats[0].ask(t.Context(), kDecommission, id); err != nil {
				t.Fatal(err)
			}
			p.rests(id, "decommissioned")
			if role, _, schema := p.mayLogIn(p.admin(), id); role || schema {
				t.Errorf("after a decommission the role stands: %v, the schema: %v", role, schema)
			}
		})
	}
}

// retried resets a failed workspace and requests a retry.
func (p *cluster) retried(id string) {
	p.t.Helper()
	for _, kind := range []commonv1.OperationKind{kReset, kRetry} {
		if _, err := p.seats[0].ask(p.t.Context(), kind, id); err != nil {
			p.t.Fatal(err)
		}
	}
	p.rests(id, "active")
}

// hasItsRows fails the test unless the role of the workspace reads the rows that it wrote.
func (p *cluster) hasItsRows(id string) {
	p.t.Helper()
	conn, err := p.login(id)
	if err != nil {
		p.t.Fatal(err)
	}
	var rows int
	if err := conn.QueryRow(p.t.Context(), `SELECT count(*) FROM mine`).Scan(&rows); err != nil || rows != 3 {
		p.t.Errorf("the tenant has %d of 3 rows: %v", rows, err)
	}
}
