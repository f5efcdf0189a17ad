package operation

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/lock"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/internal/rpc"
	"github.com/gpuaas/mesh/internal/secretenv"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/provision"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
	"github.com/gpuaas/mesh/services/lifecycle/schema"
	"github.com/gpuaas/mesh/services/lifecycle/spec"
	"github.com/gpuaas/mesh/services/lifecycle/tenants"
)

func TestMain(m *testing.M) { testkit.Main(m, testkit.AtOnce(4)) }

func catalogue() spec.Catalogue {
	return spec.Catalogue{
		Plans:   map[string]spec.Plan{"local": {MaxGPUs: 8, MaxStorageBytes: 1 << 40, MaxWorkloads: 4}},
		Regions: []string{"here"}, Placements: []commonv1.PlacementDriver{
			commonv1.PlacementDriver_PLACEMENT_DRIVER_STATIC, commonv1.PlacementDriver_PLACEMENT_DRIVER_PROCESS,
		},
		Default: commonv1.PlacementDriver_PLACEMENT_DRIVER_STATIC,
	}
}

type bed struct {
	t      *testing.T
	db     *testkit.Database
	server *Server
}

func newBed(t *testing.T, joins *lock.Lock) *bed {
	t.Helper()
	testkit.IO(t)
	db := testkit.DB(t)
	steps := provision.NewSteps(provision.StepDeps{Catalogue: catalogue()})
	reg, err := steps.Registry()
	if err != nil {
		t.Fatal(err)
	}
	pool := db.Pool("lifecycle")
	core, err := saga.New(saga.Deps{DB: pool, Registry: reg, Logger: testkit.Logger(t)})
	if err != nil {
		t.Fatal(err)
	}
	return &bed{t: t, db: db, server: NewServer(Deps{
		Logger: testkit.Logger(t), DB: pool, Core: core, Catalogue: catalogue(), Lock: joins,
		Policy:       policy.Fixed{Set: policy.Defaults()},
		Secrets:      secretKeys(t, secretenv.NewKey()),
		DefaultQuota: tenants.Quota{Workspaces: 3, GPUs: 4, StorageBytes: 1 << 40},
	})}
}

func (b *bed) tenant(name string) string {
	b.t.Helper()
	res, err := b.server.CreateTenant(b.t.Context(), &lifecyclev1.CreateTenantRequest{Name: name})
	if err != nil {
		b.t.Fatal(err)
	}
	return res.GetTenant().GetTenantId()
}

func (b *bed) create(ctx context.Context, tenant, name, key string, gpus int32) (*lifecyclev1.Operation, error) {
	res, err := b.server.RequestOperation(ctx, &lifecyclev1.RequestOperationRequest{
		Kind: commonv1.OperationKind_OPERATION_KIND_CREATE, IdempotencyKey: key,
		Target: &lifecyclev1.RequestOperationRequest_Create{Create: &lifecyclev1.CreateWorkspace{
			Tenant: tenant, Name: name, Spec: &lifecyclev1.WorkspaceSpec{Gpus: gpus},
		}},
	})
	return res.GetOperation(), err
}

func (b *bed) count(sql string) int {
	b.t.Helper()
	var n int
	if err := b.db.OwnerPool().QueryRow(b.t.Context(), sql).Scan(&n); err != nil {
		b.t.Fatal(err)
	}
	return n
}

func want(t *testing.T, err error, reason commonv1.Reason) {
	t.Helper()
	if err == nil || fault.ReasonOf(err) != reason {
		t.Fatalf("got %v, want %v", err, reason)
	}
}

func TestOneOfManyCreatesIsTheOperation(t *testing.T) {
	for _, tc := range []struct {
		name  string
		joins func(t *testing.T) *lock.Lock
	}{
		{name: "without a lock store", joins: func(*testing.T) *lock.Lock { return nil }},
		{name: "with a lock store", joins: redisLock},
	} {
		t.Run(tc.name, func(t *testing.T) {
			b := newBed(t, tc.joins(t))
			b.tenant("acme")
			const callers = 100
			var wg sync.WaitGroup
			ops := make([]*lifecyclev1.Operation, callers)
			for i := range callers {
				wg.Go(func() {
					op, err := b.create(t.Context(), "acme", "demo", "", 1)
					if err != nil {
						t.Error(err)
					}
					ops[i] = op
				})
			}
			wg.Wait()
			if t.Failed() {
				return
			}
			joined := 0
			for _, op := range ops {
				if op.GetOperationId() != ops[0].GetOperationId() {
					t.Fatalf("two operations: %v and %v", op, ops[0])
				}
				if op.GetJoined() {
					joined++
				}
			}
			if joined != callers-1 {
				t.Fatalf("%d joined", joined)
			}
			if n := b.count(`SELECT count(*) FROM lifecycle.saga_run`); n != 1 {
				t.Fatalf("%d runs", n)
			}
		})
	}
}

func redisLock(t *testing.T) *lock.Lock {
	t.Helper()
	testkit.IO(t)
	// a slow answer must not count as a missing one
	patient := lock.Config{Budget: 30 * time.Second, Cooldown: 20 * time.Millisecond}
	client, err := lock.Dial(testkit.Redis(t).URL(), patient)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = client.Close() })
	l, err := lock.New(lock.Deps{Client: client, Logger: testkit.Logger(t)}, patient)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func TestANameThatIsTakenNamesItsHolder(t *testing.T) {
	b := newBed(t, nil)
	b.tenant("acme")
	first, err := b.create(t.Context(), "acme", "demo", "", 1)
	if err != nil {
		t.Fatal(err)
	}
	_, err = b.create(t.Context(), "acme", "demo", "", 2)
	want(t, err, commonv1.Reason_REASON_WORKSPACE_NAME_TAKEN)
	if f, _ := fault.As(err); f.ConflictingID != first.GetWorkspaceId() {
		t.Fatalf("it names %q, not %q", f.ConflictingID, first.GetWorkspaceId())
	}
}

func TestRefusalsChangeNothing(t *testing.T) {
	b := newBed(t, nil)
	b.tenant("acme")
	for _, tc := range []struct {
		name string
		req  *lifecyclev1.CreateWorkspace
		want commonv1.Reason
	}{
		{
			"unknown tenant", &lifecyclev1.CreateWorkspace{Tenant: "nobody", Name: "demo"},
			commonv1.Reason_REASON_TENANT_UNKNOWN,
		},
		{"too many GPUs", &lifecyclev1.CreateWorkspace{
			Tenant: "acme", Name: "demo",
			Spec: &lifecyclev1.WorkspaceSpec{Gpus: 5},
		}, commonv1.Reason_REASON_QUOTA_EXCEEDED},
		{"region", &lifecyclev1.CreateWorkspace{
			Tenant: "acme", Name: "demo",
			Spec: &lifecyclev1.WorkspaceSpec{Region: "mars"},
		}, commonv1.Reason_REASON_REGION_UNAVAILABLE},
		{"placement", &lifecyclev1.CreateWorkspace{Tenant: "acme", Name: "demo", Spec: &lifecyclev1.WorkspaceSpec{
			Placement: commonv1.PlacementDriver_PLACEMENT_DRIVER_DOCKER,
		}}, commonv1.Reason_REASON_PLACEMENT_UNAVAILABLE},
		{
			"plan", &lifecyclev1.CreateWorkspace{Tenant: "acme", Name: "demo", Spec: &lifecyclev1.WorkspaceSpec{Plan: "huge"}},
			commonv1.Reason_REASON_PLAN_UNKNOWN,
		},
		{
			"an image where processes run",
			&lifecyclev1.CreateWorkspace{Tenant: "acme", Name: "demo", Spec: &lifecyclev1.WorkspaceSpec{
				Workloads: []*nodev1.Workload{{Name: "web", Image: "nginx:1"}},
			}}, commonv1.Reason_REASON_PLACEMENT_UNAVAILABLE,
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, err := b.server.RequestOperation(t.Context(), &lifecyclev1.RequestOperationRequest{
				Kind:   commonv1.OperationKind_OPERATION_KIND_CREATE,
				Target: &lifecyclev1.RequestOperationRequest_Create{Create: tc.req},
			})
			want(t, err, tc.want)
			if n := b.count(`SELECT count(*) FROM lifecycle.workspace`); n != 0 {
				t.Fatalf("%d workspaces were made", n)
			}
		})
	}
}

func TestQuotaIsExactUnderConcurrency(t *testing.T) {
	b := newBed(t, nil)
	b.tenant("acme")
	var wg sync.WaitGroup
	var mu sync.Mutex
	admitted, refused := 0, 0
	for i := range 20 {
		wg.Go(func() {
			_, err := b.create(t.Context(), "acme", fmt.Sprintf("w%d", i), "", 0)
			mu.Lock()
			defer mu.Unlock()
			switch {
			case err == nil:
				admitted++
			case fault.Has(err, commonv1.Reason_REASON_QUOTA_EXCEEDED):
				refused++
			default:
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if admitted != 3 || refused != 17 {
		t.Fatalf("%d admitted, %d refused", admitted, refused)
	}
}

func TestAnIdempotencyKeyIsAnsweredForEver(t *testing.T) {
	b := newBed(t, nil)
	b.tenant("acme")
	first, err := b.create(t.Context(), "acme", "demo", "k1", 1)
	if err != nil {
		t.Fatal(err)
	}
	again, err := b.create(t.Context(), "acme", "demo", "k1", 1)
	if err != nil || again.GetOperationId() != first.GetOperationId() || !again.GetReplayed() {
		t.Fatalf("%v %v", again, err)
	}
	_, err = b.create(t.Context(), "acme", "other", "k1", 1)
	want(t, err, commonv1.Reason_REASON_IDEMPOTENCY_KEY_REUSED)
	_, err = b.create(t.Context(), "acme", "demo", "k1", 2)
	want(t, err, commonv1.Reason_REASON_IDEMPOTENCY_KEY_REUSED)
}

func TestAForeignTenantsWorkspaceIsNotThere(t *testing.T) {
	b := newBed(t, nil)
	acme, other := b.tenant("acme"), b.tenant("other")
	op, err := b.create(t.Context(), "acme", "demo", "", 0)
	if err != nil {
		t.Fatal(err)
	}
	foreign := rpc.WithPerson(t.Context(), rpc.Person{Subject: "eve", TenantID: other, Roles: []string{"tenant"}})
	_, err = b.create(foreign, acme, "mine", "", 0)
	want(t, err, commonv1.Reason_REASON_TENANT_UNKNOWN)
	_, err = b.server.GetActions(foreign, &lifecyclev1.GetActionsRequest{WorkspaceId: op.GetWorkspaceId()})
	want(t, err, commonv1.Reason_REASON_NOT_FOUND)
}

func TestActionsFollowTheState(t *testing.T) {
	b := newBed(t, nil)
	b.tenant("acme")
	op, err := b.create(t.Context(), "acme", "demo", "", 0)
	if err != nil {
		t.Fatal(err)
	}
	res, err := b.server.GetActions(t.Context(), &lifecyclev1.GetActionsRequest{WorkspaceId: op.GetWorkspaceId()})
	if err != nil {
		t.Fatal(err)
	}
	possible := map[commonv1.OperationKind]bool{}
	for _, a := range res.GetActions() {
		possible[a.GetKind()] = a.GetPossible()
		if !a.GetPossible() && (len(a.GetUnmet()) == 0 || a.GetReason() == commonv1.Reason_REASON_UNSPECIFIED) {
			t.Errorf("%v is not possible, and does not say why", a.GetKind())
		}
	}
	if !possible[kCancel] || possible[kReset] || possible[kRetry] || possible[kDecommission] || possible[kSkipUndo] {
		t.Fatalf("of a running create: %v", possible)
	}
	_, err = b.server.RequestOperation(t.Context(), &lifecyclev1.RequestOperationRequest{
		Kind: kDecommission, Reason: "a test asks",
		Target: &lifecyclev1.RequestOperationRequest_WorkspaceId{WorkspaceId: op.GetWorkspaceId()},
	})
	want(t, err, commonv1.Reason_REASON_OPERATION_IN_PROGRESS)
}

func TestSchemaNames(t *testing.T) {
	id := "01890000-0000-7000-8000-0123456789ab"
	for _, tc := range []struct{ tenant, workspace, want string }{
		{"acme", "demo", "t_acme_demo"},
		{"a-b", "c", "t_a_b_c_0123456789ab"},
		{"a", "b-c", "t_a_b_c_0123456789ab"},
	} {
		if got := schema.Name(tc.tenant, tc.workspace, id); got != tc.want {
			t.Errorf("%s/%s: %s, not %s", tc.tenant, tc.workspace, got, tc.want)
		}
	}
	long := schema.Name("aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb", id)
	if len(long) > 63 {
		t.Errorf("%d characters", len(long))
	}
}

func (b *bed) cancel(id, key string) (*lifecyclev1.Operation, error) {
	res, err := b.server.RequestOperation(b.t.Context(), &lifecyclev1.RequestOperationRequest{
		Kind: kCancel, IdempotencyKey: key, Target: &lifecyclev1.RequestOperationRequest_WorkspaceId{WorkspaceId: id},
	})
	return res.GetOperation(), err
}

func TestAVerbsKeyIsAnsweredForEverAsWell(t *testing.T) {
	b := newBed(t, nil)
	b.tenant("acme")
	op, err := b.create(t.Context(), "acme", "demo", "", 0)
	if err != nil {
		t.Fatal(err)
	}
	first, err := b.cancel(op.GetWorkspaceId(), "k")
	if err != nil {
		t.Fatal(err)
	}
	again, err := b.cancel(op.GetWorkspaceId(), "k")
	if err != nil || again.GetOperationId() != first.GetOperationId() || !again.GetReplayed() {
		t.Fatalf("%v %v", again, err)
	}
	_, err = b.create(t.Context(), "acme", "demo2", "k", 0)
	want(t, err, commonv1.Reason_REASON_IDEMPOTENCY_KEY_REUSED)
}

// A create that is being undone serves no request for the workspace, whichever way the request takes.
func TestACancelledCreateIsNotJoined(t *testing.T) {
	b := newBed(t, redisLock(t))
	b.tenant("acme")
	op, err := b.create(t.Context(), "acme", "demo", "", 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := b.cancel(op.GetWorkspaceId(), ""); err != nil {
		t.Fatal(err)
	}
	_, err = b.create(t.Context(), "acme", "demo", "", 0)
	want(t, err, commonv1.Reason_REASON_WORKSPACE_NAME_TAKEN)
}

func TestScramVerifierIsWhatPostgresTakes(t *testing.T) {
	testkit.IO(t)
	db := testkit.DB(t)
	pool, err := pgxpool.New(t.Context(), db.WorkloadURL())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	role := "scram_" + strings.ReplaceAll(ids.New(), "-", "")[18:]
	if _, err := pool.Exec(t.Context(),
		`CREATE ROLE `+role+` LOGIN PASSWORD '`+schema.Verifier("sesame", []byte("0123456789abcdef"))+`'`); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = pool.Exec(context.WithoutCancel(t.Context()), `DROP ROLE `+role) })
	if _, err := pool.Exec(t.Context(),
		`GRANT CONNECT ON DATABASE `+pool.Config().ConnConfig.Database+` TO `+role); err != nil {
		t.Fatal(err)
	}
	for password, ok := range map[string]bool{"sesame": true, "wrong": false} {
		cfg := pool.Config().ConnConfig.Copy()
		cfg.User, cfg.Password = role, password
		conn, err := pgx.ConnectConfig(t.Context(), cfg)
		if (err == nil) != ok {
			t.Errorf("login with %q: %v", password, err)
		}
		if conn != nil {
			_ = conn.Close(t.Context())
		}
	}
}
