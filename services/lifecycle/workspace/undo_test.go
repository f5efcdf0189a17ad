package workspace

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
)

// failing is one way in which a recreate fails for good at a step.
type failing struct {
	step string
	// begin makes the step fail, or wait until the recreate is cancelled.
	begin  func(p *plane, name string)
	cancel bool
	end    func(p *plane, name string)
}

func refusing(kind string) func(*plane, string) {
	return func(p *plane, _ string) {
		p.world.mu.Lock()
		defer p.world.mu.Unlock()
		p.world.refuse, p.world.reason = kind, commonv1.Reason_REASON_UNSPECIFIED
		if kind != "" {
			p.world.reason = commonv1.Reason_REASON_INVALID_ARGUMENT
		}
	}
}

func with(change func(w *world)) func(*plane, string) {
	return func(p *plane, _ string) {
		p.world.mu.Lock()
		defer p.world.mu.Unlock()
		change(p.world)
	}
}

// failures lists a failure of each step of a recreate.
func failures() []failing {
	const forbid = `CREATE FUNCTION lifecycle.forbid() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'no handles now'; END $$;
		CREATE TRIGGER forbid BEFORE INSERT OR UPDATE ON lifecycle.workspace_handle FOR EACH ROW EXECUTE FUNCTION lifecycle.forbid()`
	owner := func(sql string) func(*plane, string) {
		return func(p *plane, _ string) {
			if _, err := p.db.OwnerPool().Exec(p.t.Context(), sql); err != nil {
				p.t.Fatal(err)
			}
		}
	}
	tenant := func(sql string) func(*plane, string) {
		return func(p *plane, name string) {
			p.schemas(strings.ReplaceAll(sql, "{schema}", pgx.Identifier{name}.Sanitize()))
		}
	}
	return []failing{
		{step: StepStorage, begin: refusing("storage.allocate"), end: refusing("")},
		{step: StepHandle, begin: owner(forbid), end: owner(`DROP FUNCTION lifecycle.forbid() CASCADE`)},
		{
			step: StepSchema, cancel: true, begin: tenant(`ALTER TABLE {schema}.workspace_info RENAME TO hidden`),
			end: tenant(`ALTER TABLE {schema}.hidden RENAME TO workspace_info`),
		},
		{step: StepDeploy, begin: refusing("workload.deploy"), end: refusing("")},
		{
			step: StepReady, cancel: true, begin: with(func(w *world) { w.unready = true }),
			end: with(func(w *world) { w.unready = false }),
		},
	}
}

// comesTo waits until the open run of a workspace is at a step and has done something there that did not end it.
func (p *plane) comesTo(id, step string) {
	p.t.Helper()
	testkit.Eventually(p.t, testkit.Patience, func() error {
		run, open, err := saga.LiveRun(testkit.Context(p.t), p.db.Pool(pg.RoleLifecycle), id)
		if err != nil {
			return err
		}
		if !open || run.StepName() != step || run.WhyWaiting == "" {
			return fmt.Errorf("the run is at %q: %s", run.StepName(), run.WhyWaiting)
		}
		return nil
	})
}

// keeps fails unless the rows of the tenant stand, and the handle.
func (p *plane) keeps(id, name string) {
	p.t.Helper()
	var rows int
	err := p.admin().QueryRow(p.t.Context(), `SELECT count(*) FROM `+pgx.Identifier{name}.Sanitize()+`.mine`).Scan(&rows)
	if err != nil || rows != 3 {
		p.t.Errorf("of the tenant's 3 rows %d are left: %v", rows, err)
	}
	if role, login, schema := p.mayLogIn(p.admin(), id); !role || login || !schema {
		p.t.Errorf("the role stands: %v and may log in: %v, the schema: %v", role, login, schema)
	}
	if n := p.count(`SELECT count(*) FROM lifecycle.workspace_handle WHERE workspace_id = $1`, id); n != 1 {
		p.t.Error("the handle is gone")
	}
	n := p.count(`SELECT count(*) FROM lifecycle.resource_claim WHERE workspace_id = $1 AND kind IN ('schema', 'handle')
		AND confirmed_at IS NOT NULL AND released_at IS NULL AND orphaned_at IS NULL`, id)
	if n != 2 {
		p.t.Errorf("%d claims on schema and handle are live", n)
	}
}

// TestAFailedRecreateKeepsWhatStoodBefore: its undo takes away what it made itself, whichever step it fails at; a recreate
// after it has the tenant's data, and so has a retry.
func TestAFailedRecreateKeepsWhatStoodBefore(t *testing.T) {
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
			if f.step == StepStorage || f.step == StepHandle {
				// The run has not come to the schema, and leaves the login of its role too.
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

// retried resets a failed workspace and asks for a retry.
func (p *plane) retried(id string) {
	p.t.Helper()
	for _, kind := range []commonv1.OperationKind{kReset, kRetry} {
		if _, err := p.seats[0].ask(p.t.Context(), kind, id); err != nil {
			p.t.Fatal(err)
		}
	}
	p.rests(id, "active")
}

// hasItsRows fails unless the role of the workspace reads what it wrote.
func (p *plane) hasItsRows(id string) {
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

// TestARecreateThatEndedNothingLeavesTheInstance: cancelled while the former instance cannot be confirmed ended, it ends
// neither that instance nor the storage in it.
func TestARecreateThatEndedNothingLeavesTheInstance(t *testing.T) {
	p, id, name, _ := tenantOf(t)
	was := p.world.standing()
	with(func(w *world) { w.endless, w.mute = true, true })(p, name)
	if _, err := p.seats[0].ask(t.Context(), kRecreate, id); err != nil {
		t.Fatal(err)
	}
	p.comesTo(id, StepPrevious)
	if _, err := p.seats[0].ask(t.Context(), kCancel, id); err != nil {
		t.Fatal(err)
	}
	with(func(w *world) { w.endless, w.mute = false, false })(p, name)
	p.rests(id, "failed")
	// Its workload was stopped, or was not: what the agent had begun when the cancel came.
	without := func(list []string) []string {
		return slices.DeleteFunc(slices.Clone(list), func(s string) bool { return strings.Contains(s, " workload ") })
	}
	if got := p.world.standing(); !slices.Equal(without(got), without(was)) {
		t.Errorf("there stand %q, and before %q", got, was)
	}
	p.retried(id)
	p.never("a retry of a recreate that ended nothing")
	p.hasItsRows(id)
	if got := p.world.standing(); !slices.Contains(got, "box "+id+":3") || len(got) != len(was) {
		t.Errorf("after a retry there stand %q", got)
	}
}

// TestAFailedRecreateKeepsTheStorageOfItsMachine: directory, slot and GPUs of a shared machine stay the workspace's,
// nobody else is given them, and a recreate or a retry goes on there.
func TestAFailedRecreateKeepsTheStorageOfItsMachine(t *testing.T) {
	for n, f := range failures() {
		t.Run(f.step, func(t *testing.T) {
			p := newPlane(t, planeConfig{seats: 1, lease: 15 * time.Second})
			node := p.machine("machine")
			id := p.create(p.tenant(), "demo", byStatic)
			w := p.workspace(id)
			name := schemaName(w.Tenant, w.Name, id)
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
			if got := p.world.standing(); !slices.ContainsFunc(got, func(s string) bool { return strings.Contains(s, "storage") }) {
				t.Errorf("the workspace's directory is gone: there stand %q", got)
			}
			if n := p.count(`SELECT count(*) FROM lifecycle.allocation a JOIN lifecycle.gpu_hold h USING (allocation_id)
				WHERE a.workspace_id = $1 AND a.node_id = $2 AND a.state IN ('allocating', 'active')`, id, node); n != 1 && f.step != StepStorage {
				t.Errorf("%d GPUs are held for the workspace", n)
			}
			if n := p.count(`SELECT count(*) FROM lifecycle.allocation WHERE workspace_id = $1 AND node_id = $2
				AND state IN ('allocating', 'active')`, id, node); n != 1 {
				t.Errorf("the workspace has %d slots", n)
			}
			f.end(p, name)
			if n%2 == 0 {
				p.retried(id)
			} else {
				p.recreated(id)
			}
			if _, err := p.seats[0].ask(t.Context(), kDecommission, id); err != nil {
				t.Fatal(err)
			}
			p.rests(id, "decommissioned")
			if got := p.world.standing(); len(got) != 1 {
				t.Errorf("after a decommission there stand %q", got)
			}
			if n := p.count(`SELECT count(*) FROM lifecycle.resource_claim WHERE workspace_id = $1 AND released_at IS NULL`, id); n != 0 {
				t.Errorf("%d claims are live", n)
			}
		})
	}
}

// TestAnUndoTakesWhatAnEarlierBuildClaimed: while replicas are updated, one of the build before writes claims that do not
// say who made them, and one of this build undoes the run.
func TestAnUndoTakesWhatAnEarlierBuildClaimed(t *testing.T) {
	p := newPlane(t, planeConfig{seats: 1, lease: 15 * time.Second})
	with(func(w *world) { w.unready = true })(p, "")
	res, err := p.seats[0].server.RequestOperation(t.Context(), &lifecyclev1.RequestOperationRequest{
		Kind: commonv1.OperationKind_OPERATION_KIND_CREATE, Target: &lifecyclev1.RequestOperationRequest_Create{Create: &lifecyclev1.CreateWorkspace{
			Tenant: p.tenant(), Name: "demo", Spec: &lifecyclev1.WorkspaceSpec{Placement: byProcess, Gpus: 1},
		}},
	})
	if err != nil {
		t.Fatal(err)
	}
	id := res.GetOperation().GetWorkspaceId()
	p.comesTo(id, StepReady)
	if _, err := p.db.OwnerPool().Exec(t.Context(), `UPDATE lifecycle.resource_claim SET made_by_run = NULL`); err != nil {
		t.Fatal(err)
	}
	if _, err := p.seats[0].ask(t.Context(), kCancel, id); err != nil {
		t.Fatal(err)
	}
	p.rests(id, "failed")
	if got := p.world.standing(); len(got) != 0 {
		t.Errorf("there stand %q", got)
	}
	if n := p.count(`SELECT count(*) FROM lifecycle.resource_claim WHERE workspace_id = $1 AND released_at IS NULL`, id); n != 0 {
		t.Errorf("%d claims are live", n)
	}
}

// TestASchemaKnowsWhichRunMadeIt: a driver that dies after it has made a schema, and before that is recorded, leaves the
// note of its run on it, in the transaction that made it. Another run's undo finds that note and drops nothing.
func TestASchemaKnowsWhichRunMadeIt(t *testing.T) {
	p := newPlane(t, planeConfig{seats: 1, lease: 15 * time.Second})
	id, first, second := ids.New(), ids.New(), ids.New()
	name := schemaName(p.tenant(), "demo", id) // roles belong to the whole server
	ran := func(run string, epoch, op int64) *saga.Env {
		return &saga.Env{RunID: run, WorkspaceID: id, Epoch: epoch, OpSeq: op}
	}
	if _, err := p.seats[0].steps.migrateTenant(t.Context(), ran(first, 1, 1), name); err != nil {
		t.Fatal(err)
	}
	if _, err := p.seats[0].steps.migrateTenant(t.Context(), ran(second, 2, 2), name); err != nil {
		t.Fatal(err)
	}
	kept, err := dropOwn(t.Context(), p.workloads(), name, writerOf(ran(second, 2, 3)))
	if err != nil || !kept {
		t.Fatalf("a schema of another run was kept: %v, %v", kept, err)
	}
	if role, login, schema := hasRole(t, p.admin(), name); !role || login || !schema {
		t.Fatalf("the role stands: %v and may log in: %v, the schema: %v", role, login, schema)
	}
	// Its name is taken for as long as it stands.
	if holder, err := schemaHolder(t.Context(), p.workloads(), name); err != nil || holder != id {
		t.Fatalf("%q has the name: %v", holder, err)
	}
	var dropped bool
	err = p.admin().QueryRow(t.Context(), `SELECT dropped FROM gpuaas_fence.schema WHERE name = $1`, name).Scan(&dropped)
	if err != nil || dropped {
		t.Errorf("its fence counts it as dropped: %v, %v", dropped, err)
	}
	kept, err = dropOwn(t.Context(), p.workloads(), name, writerOf(ran(first, 2, 4)))
	if err != nil || kept {
		t.Fatalf("a schema was kept from the undo of its own run: %v, %v", kept, err)
	}
	if role, _, schema := hasRole(t, p.admin(), name); role || schema {
		t.Fatalf("the role stands: %v, the schema: %v", role, schema)
	}
	// Of a role that stood before, alone, the login goes and not the role.
	quoted := pgx.Identifier{name}.Sanitize()
	p.schemas(`CREATE ROLE ` + quoted + ` LOGIN`)
	if _, err := p.seats[0].steps.migrateTenant(t.Context(), ran(second, 2, 5), name); err != nil {
		t.Fatal(err)
	}
	kept, err = dropOwn(t.Context(), p.workloads(), name, writerOf(ran(second, 2, 6)))
	if role, login, schema := hasRole(t, p.admin(), name); err != nil || kept || !role || login || schema {
		t.Fatalf("kept: %v, %v; the role stands: %v and may log in: %v, the schema: %v", kept, err, role, login, schema)
	}
	// A build before left no note: what it made in a later epoch than the first counts as made before.
	if _, err := p.seats[0].steps.migrateTenant(t.Context(), ran("", 2, 7), name); err != nil {
		t.Fatal(err)
	}
	if kept, err = dropOwn(t.Context(), p.workloads(), name, writerOf(ran(second, 2, 8))); err != nil || !kept {
		t.Fatalf("a schema with no note was kept: %v, %v", kept, err)
	}
}
