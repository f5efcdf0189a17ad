package operation

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/allocation"
	"github.com/gpuaas/mesh/services/lifecycle/provision"
	"github.com/gpuaas/mesh/services/lifecycle/reap"
	"github.com/gpuaas/mesh/services/lifecycle/schema"
)

func (p *cluster) sharedReaper() *reap.SharedReaper {
	return reap.NewSharedReaper(reap.SharedReaperDeps{
		Logger: testkit.Logger(p.t), DB: p.db.Pool(pg.RoleLifecycle), Workloads: p.workloads(), Identities: p.world,
		Committed: func() {},
	})
}

// workloads returns the pool that the seats use.
func (p *cluster) workloads() *pgxpool.Pool { return p.workloadDB }

// admin opens a session in the workload database that is in no pool.
func (p *cluster) admin() *pgx.Conn {
	p.t.Helper()
	conn, err := pgx.Connect(p.t.Context(), p.db.WorkloadURL())
	if err != nil {
		p.t.Fatal(err)
	}
	p.t.Cleanup(func() { _ = conn.Close(context.WithoutCancel(p.t.Context())) })
	return conn
}

// login opens a session as the workspace's role, with the password that its workloads have.
func (p *cluster) login(id string) (*pgx.Conn, error) {
	p.t.Helper()
	w := p.workspace(id)
	name := schema.Name(w.Tenant, w.Name, w.ID)
	conn, err := pgx.Connect(testkit.Context(p.t),
		p.seats[0].steps.DatabaseEnv(provision.SchemaOutput{Schema: name, Role: name}, w.Epoch)["DATABASE_URL"])
	if err == nil {
		p.t.Cleanup(func() { _ = conn.Close(context.WithoutCancel(p.t.Context())) })
	}
	return conn, err
}

// mayLogIn reports whether the workspace's role exists and may log in, and whether its schema exists, by the server's
// own catalogue.
func (p *cluster) mayLogIn(admin *pgx.Conn, id string) (role, login, there bool) {
	p.t.Helper()
	w := p.workspace(id)
	return hasRole(p.t, admin, schema.Name(w.Tenant, w.Name, w.ID))
}

// hasRole is mayLogIn for the role and the schema of a name.
func hasRole(t *testing.T, admin *pgx.Conn, name string) (role, login, there bool) {
	t.Helper()
	err := admin.QueryRow(testkit.Context(t),
		`SELECT EXISTS (SELECT 1 FROM pg_roles WHERE rolname = $1), EXISTS (SELECT 1 FROM pg_roles
			WHERE rolname = $1 AND rolcanlogin),
		EXISTS (SELECT 1 FROM pg_namespace WHERE nspname = $1)`, name).Scan(&role, &login, &there)
	if err != nil {
		t.Fatal(err)
	}
	return role, login, there
}

// force forces a failed release on a person's attestation, with every claim acknowledged.
func (p *cluster) force(id string) {
	p.t.Helper()
	a := p.newest(id)
	req := &lifecyclev1.ForceReleaseRequest{
		AllocationId: a.ID, ExpectedFence: a.Fence, FencedProof: commonv1.FencedProof_FENCED_PROOF_OPERATOR_ASSERTS,
		Reason: "the database is lost", DryRun: true,
	}
	allocations := NewAllocations(p.seats[0].server)
	dry, err := allocations.ForceRelease(operator(p.t.Context()), req)
	if err != nil {
		p.t.Fatal(err)
	}
	req.DryRun = false
	for _, c := range dry.GetClaims() {
		req.AckOrphans = append(req.AckOrphans, c.GetClaimId())
	}
	if _, err := allocations.ForceRelease(operator(p.t.Context()), req); err != nil {
		p.t.Fatal(err)
	}
	p.rests(id, "decommissioned")
}

// given inserts a claim that was given up.
func (p *cluster) given(id, kind, name string, epoch int64) string {
	p.t.Helper()
	claim := ids.New()
	_, err := p.db.OwnerPool().Exec(p.t.Context(), `
		INSERT INTO lifecycle.resource_claim (id, workspace_id, tenant_id, run_id, step, kind, scope, deterministic_name,
			epoch, orphaned_at, orphaned_by, orphan_reason)
		SELECT $2, id, tenant_id, run_id, 1, $3, 'shared', $4, $5, mesh.clock(), 'olga', 'lost' FROM lifecycle.workspace
			WHERE id = $1`, id, claim, kind, name, epoch)
	if err != nil {
		p.t.Fatal(err)
	}
	return claim
}

func (p *cluster) reapedWhy(claim string) string {
	p.t.Helper()
	var why string
	err := p.db.OwnerPool().QueryRow(testkit.Context(p.t),
		`SELECT CASE WHEN released_at IS NULL THEN '' ELSE orphan_reason END FROM lifecycle.resource_claim WHERE id = $1`,
		claim).Scan(&why)
	if err != nil {
		p.t.Fatal(err)
	}
	return why
}

func (p *cluster) givenUp(id, kind string) int {
	p.t.Helper()
	return p.count(`SELECT count(*) FROM lifecycle.resource_claim
		WHERE workspace_id = $1 AND kind = $2 AND orphaned_at IS NOT NULL AND released_at IS NULL`, id, kind)
}

// A forced release leaves behind a schema that cannot be dropped, since a session reads it; its role cannot log in even
// so, and once the reader has gone the sweep drops the schema. Until then it is tried less and less often.
func TestAForcedReleaseLeavesNoLogin(t *testing.T) {
	t.Parallel()
	p := newCluster(t, clusterConfig{seats: 1, lease: 15 * time.Second, release: time.Second, grace: 15 * time.Second})
	p.machine("m1")
	tenant := p.tenant()
	id := p.create(tenant, "demo", byStatic)
	w := p.workspace(id)
	admin, reader := p.admin(), p.admin()
	session, err := p.login(id)
	if err != nil {
		t.Fatal(err)
	}
	// The role has a timeout for transactions that are forgotten; this one is not.
	if _, err := reader.Exec(t.Context(), `SET idle_in_transaction_session_timeout = 0`); err != nil {
		t.Fatal(err)
	}
	if _, err := reader.Exec(t.Context(),
		`BEGIN; LOCK TABLE `+pgx.Identifier{schema.Name(w.Tenant, w.Name, w.ID), "kv"}.Sanitize()+
			` IN ACCESS SHARE MODE`); err != nil {
		t.Fatal(err)
	}
	if _, err := p.seats[0].ask(t.Context(), kDecommission, id); err != nil {
		t.Fatal(err)
	}
	p.rests(id, "stuck")
	// The drop that was given up has released its locks.
	testkit.Eventually(t, testkit.Patience, func() error {
		var busy int
		err := admin.QueryRow(testkit.Context(t),
			`SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND usename = current_user
			AND state <> 'idle' AND pid NOT IN (pg_backend_pid(), $1)`, reader.PgConn().PID()).Scan(&busy)
		if err == nil && busy > 0 {
			err = fmt.Errorf("%d sessions of lifecycle still work in the database", busy)
		}
		return err
	})
	// As if an administrator had given the login back meanwhile: the forced release takes it away again.
	if _, err := admin.Exec(t.Context(),
		`ALTER ROLE `+pgx.Identifier{schema.Name(w.Tenant, w.Name, w.ID)}.Sanitize()+` LOGIN`); err != nil {
		t.Fatal(err)
	}
	p.force(id)
	if role, login, schema := p.mayLogIn(admin, id); !role || login || !schema {
		t.Errorf("after the force: role %v, login %v, schema %v", role, login, schema)
	}
	if _, err := p.login(id); err == nil {
		t.Error("the workspace's role still logs in")
	} else if e, ok := errors.AsType[*pgconn.PgError](err); !ok || e.Code != "28000" {
		t.Errorf("a login is refused with %v", err)
	}
	testkit.Eventually(t, testkit.Patience, func() error {
		if err := session.Ping(t.Context()); err == nil {
			return errors.New("the session that was open still is")
		}
		return nil
	})
	if n := p.givenUp(id, allocation.KindSchema); n != 1 {
		t.Fatalf("%d schemas were given up", n)
	}
	tries := func() int {
		return p.count(`SELECT coalesce(sum(t.tries), 0) FROM lifecycle.orphan_try t
			JOIN lifecycle.resource_claim c ON c.id = t.claim_id WHERE c.workspace_id = $1`, id)
	}
	for n := 1; n <= 2; n++ {
		if _, err := p.sharedReaper().Sweep(t.Context()); err == nil {
			t.Error("a schema that is read was dropped")
		}
		if got, err := p.sharedReaper().Sweep(t.Context()); err != nil || got != 0 || tries() != n {
			t.Errorf("it was tried again at once: %d, %v, %d tries", got, err, tries())
		}
		testkit.SetClockOffset(p.db, time.Duration(n)*2*reap.ReapAgain) // the second wait is twice as long
	}
	if n := p.count(`SELECT count(*) FROM lifecycle.orphan_try
		WHERE last_error <> '' AND next_at > mesh.clock()`); n != 0 {
		t.Error("after twice the wait it is not due again")
	}
	if _, err := reader.Exec(t.Context(), `ROLLBACK`); err != nil {
		t.Fatal(err)
	}
	testkit.SetClockOffset(p.db, 2*reap.ReapAgainMost)
	p.beat(4 * reap.ReapAgainMost)
	if n, err := p.sharedReaper().Sweep(t.Context()); err != nil || n != 1 {
		t.Fatalf("%d were reaped: %v", n, err)
	}
	if role, _, schema := p.mayLogIn(admin, id); role || schema {
		t.Errorf("after the sweep: role %v, schema %v", role, schema)
	}
	if n := p.newest(id).Orphans; n != 0 || p.givenUp(id, allocation.KindSchema) != 0 {
		t.Errorf("the hold tells of %d orphans", n)
	}
	if n := p.count(`SELECT count(*) FROM lifecycle.resource_claim
		WHERE workspace_id = $1 AND kind = 'schema'
		AND orphan_reason LIKE '%lost%reaped: schema and role were dropped'`, id); n != 1 {
		t.Error("the claim does not say how it is known to be gone")
	}
	// The name is free again, for the next workspace.
	testkit.Eventually(t, testkit.Patience, func() error {
		if _, err := p.machineReaper().Sweep(t.Context()); err != nil { // if the forced release was late there too
			return err
		}
		return p.placeable()
	})
	p.create(tenant, "demo", byStatic)
}

// The workload database is down when a person forces the release: the schema is left with its login, and reaped as soon
// as the database is back.
func TestAnUnreachableSchemaIsReaped(t *testing.T) {
	p := newCluster(t, clusterConfig{seats: 1, lease: 15 * time.Second, release: time.Second})
	p.machine("m1")
	id := p.create(p.tenant(), "demo", byStatic)
	admin := p.admin()
	database := pgx.Identifier{admin.Config().Database}.Sanitize()
	for _, sql := range []string{
		`ALTER DATABASE ` + database + ` CONNECTION LIMIT 0`,
		`SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity
			WHERE datname = current_database() AND pid <> pg_backend_pid()`,
	} {
		if _, err := admin.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	if err := p.workloads().Ping(t.Context()); err == nil {
		t.Fatal("the workload database is not down")
	}
	if _, err := p.seats[0].ask(t.Context(), kDecommission, id); err != nil {
		t.Fatal(err)
	}
	p.rests(id, "stuck")
	p.force(id)
	if n := p.givenUp(id, allocation.KindSchema); n != 1 {
		t.Fatalf("%d schemas were given up", n)
	}
	for range 2 {
		if _, err := p.sharedReaper().Sweep(t.Context()); err == nil ||
			!strings.Contains(err.Error(), "reach workload database") {
			t.Errorf("a sweep without the database says %v", err)
		}
	}
	if n := p.count(`SELECT count(*) FROM lifecycle.orphan_try`); n != 0 {
		t.Error("silence of the database counts against an orphan")
	}
	if _, err := admin.Exec(t.Context(), `ALTER DATABASE `+database+` CONNECTION LIMIT -1`); err != nil {
		t.Fatal(err)
	}
	if _, err := p.login(id); err != nil {
		t.Fatalf("the role is gone before anybody could take it away: %v", err)
	}
	if n, err := p.sharedReaper().Sweep(t.Context()); err != nil || n != 1 {
		t.Fatalf("%d were reaped: %v", n, err)
	}
	if role, _, schema := p.mayLogIn(admin, id); role || schema {
		t.Errorf("after the sweep: role %v, schema %v", role, schema)
	}
	if _, err := p.login(id); err == nil {
		t.Error("the workspace's role still logs in")
	}
}

// A resource of a later claim or of another workspace is never removed because of an orphan, and no work is disturbed.
func TestASharedOrphanOfAnothersResource(t *testing.T) {
	p := newCluster(t, clusterConfig{seats: 1, lease: 15 * time.Second})
	admin := p.admin()
	tenant := p.tenant()
	former := p.create(tenant, "demo", byProcess)
	if _, err := p.seats[0].ask(t.Context(), kDecommission, former); err != nil {
		t.Fatal(err)
	}
	p.rests(former, "decommissioned")
	id := p.create(tenant, "demo", byProcess)
	w := p.workspace(id)
	name := schema.Name(w.Tenant, w.Name, id)
	if name != schema.Name(tenant, "demo", former) {
		t.Fatal("the two share no name")
	}
	instance := p.newest(id).InstanceID
	same, taken := p.given(id, allocation.KindSchema, name, 1), p.given(former, allocation.KindSchema, name, 1)
	handle, identity := p.given(id, allocation.KindHandle, "ws-"+id, 1), p.given(id, allocation.KindIdentity, instance, 1)
	loose := p.given(former, allocation.KindIdentity, ids.New(), 1)
	standing := fmt.Sprint(p.world.standing())
	if n, err := p.sharedReaper().Sweep(t.Context()); err != nil || n != 5 {
		t.Errorf("%d were released: %v", n, err)
	}
	for claim, want := range map[string]string{
		same: "lost; reaped: " + reap.WhyReplaced, handle: "lost; reaped: " + reap.WhyReplaced,
		identity: "lost; reaped: " + reap.WhyReplaced, taken: "lost; reaped: its name is workspace " + id + "'s by now",
		loose: "lost; reaped: the identity is retired",
	} {
		if got := p.reapedWhy(claim); got != want {
			t.Errorf("it says %q, want %q", got, want)
		}
	}
	if role, login, there := p.mayLogIn(admin, id); !role || !login || !there {
		t.Errorf("of the workspace that lives: role %v, login %v, schema %v", role, login, there)
	}
	if now := fmt.Sprint(p.world.standing()); now != standing {
		t.Errorf("there stood %s, and now %s", standing, now)
	}
	if n := p.count(`SELECT count(*) FROM lifecycle.workspace_handle WHERE workspace_id = $1`, id); n != 1 {
		t.Error("the handle of the workspace that lives is gone")
	}

	// A handle that no claim is for is deleted, and resources that were given up on an instance are gone with the
	// instance.
	if _, err := p.db.OwnerPool().Exec(t.Context(),
		`UPDATE lifecycle.resource_claim SET orphaned_at = mesh.clock(), orphaned_by = 'olga', orphan_reason = 'lost'
		WHERE workspace_id = $1 AND kind IN ('workload', 'handle') AND released_at IS NULL`, id); err != nil {
		t.Fatal(err)
	}
	if n, err := p.sharedReaper().Sweep(t.Context()); err != nil || n != 1 {
		t.Errorf("%d were released: %v", n, err)
	}
	if n := p.count(`SELECT count(*) FROM lifecycle.workspace_handle WHERE workspace_id = $1`, id); n != 0 {
		t.Error("the handle that nobody holds stands")
	}
	if _, err := p.seats[0].ask(t.Context(), kDecommission, id); err != nil {
		t.Fatal(err)
	}
	p.rests(id, "decommissioned")
	if a := p.newest(id); a.State != commonv1.AllocationState_ALLOCATION_STATE_RELEASED || a.Orphans != 0 {
		t.Errorf("its hold is %+v", a)
	}
	if n := p.count(`SELECT count(*) FROM lifecycle.resource_claim
		WHERE workspace_id = $1 AND kind = 'workload'
		AND orphan_reason = 'lost; reaped: `+allocation.InstanceEnded+`'`, id); n != 1 {
		t.Error("what was given up on the box is not gone with it")
	}
}

// An earlier operation that takes the login away never takes effect after the operation that gives it back.
func TestTakingALoginAwayKeepsToTheFence(t *testing.T) {
	p := newCluster(t, clusterConfig{seats: 1, lease: 15 * time.Second})
	id := p.create(p.tenant(), "demo", byProcess)
	w := p.workspace(id)
	name := schema.Name(w.Tenant, w.Name, id)
	admin := p.admin()
	for _, tc := range []struct {
		by    schema.Writer
		login bool
	}{
		{schema.Writer{WorkspaceID: id, Epoch: w.Epoch, OpSeq: 1}, true},
		{schema.Writer{WorkspaceID: id, Epoch: w.Epoch - 1, OpSeq: w.OpSeq + 100}, true},
		{schema.Writer{WorkspaceID: ids.New(), Epoch: w.Epoch + 1, OpSeq: w.OpSeq + 1}, true},
		{schema.Writer{WorkspaceID: id, Epoch: w.Epoch, OpSeq: w.OpSeq}, false},
	} {
		if err := schema.Disarm(t.Context(), p.workloads(), name, tc.by); (err == nil) == tc.login {
			t.Errorf("%+v was answered %v", tc.by, err)
		}
		if _, login, _ := p.mayLogIn(admin, id); login != tc.login {
			t.Errorf("%+v: login %v", tc.by, login)
		}
	}
	if err := schema.Disarm(t.Context(), p.workloads(), "t_nobody_ever",
		schema.Writer{WorkspaceID: id, Epoch: 1}); err != nil {
		t.Errorf("a role that never was: %v", err)
	}
	// The next epoch applies the schema again, and logs in.
	p.recreated(id)
	if _, err := p.login(id); err != nil {
		t.Error(err)
	}
}
