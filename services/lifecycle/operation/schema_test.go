package operation

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/provision"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
	"github.com/gpuaas/mesh/services/lifecycle/schema"
)

// schemas runs a statement in the workload database, as an administrator outside the saga.
func (p *cluster) schemas(sql string, args ...any) {
	p.t.Helper()
	db, err := pgxpool.New(p.t.Context(), p.db.WorkloadURL())
	if err != nil {
		p.t.Fatal(err)
	}
	defer db.Close()
	if _, err := db.Exec(p.t.Context(), sql, args...); err != nil {
		p.t.Fatalf("%s: %v", sql, err)
	}
}

// attemptsAt returns the attempts at a step in a direction.
func (p *cluster) attemptsAt(runID, step, dir string) []runs.Attempt {
	p.t.Helper()
	all, err := runs.Timeline(testkit.Context(p.t), p.db.Pool(pg.RoleLifecycle), runID)
	if err != nil {
		p.t.Fatal(err)
	}
	var out []runs.Attempt
	for _, a := range all {
		if a.Name == step && a.Dir == dir {
			out = append(out, a)
		}
	}
	return out
}

// An operator needs the statement that failed; a tenant's person gets one sentence.
func TestATenantMigrationThatFailsReportsItsCause(t *testing.T) {
	t.Parallel()
	p := newCluster(t, clusterConfig{seats: 1, lease: time.Hour})
	tenant := p.tenant()
	name := schema.Name(tenant, "demo", "")
	p.schemas(fmt.Sprintf(`CREATE SCHEMA %[1]s; CREATE TABLE %[1]s.kv (key text);
		CREATE TABLE %[1]s.schema_version (version integer PRIMARY KEY,
			applied_at timestamptz NOT NULL DEFAULT now())`, name))
	res, err := p.seats[0].server.RequestOperation(t.Context(), &lifecyclev1.RequestOperationRequest{
		Kind: commonv1.OperationKind_OPERATION_KIND_CREATE, Target: &lifecyclev1.RequestOperationRequest_Create{
			Create: &lifecyclev1.CreateWorkspace{
				Tenant: tenant, Name: "demo",
				Spec: &lifecyclev1.WorkspaceSpec{Placement: byProcess, Gpus: 1},
			},
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	op := res.GetOperation()
	w := p.restsAfterRetries(op.GetWorkspaceId(), "failed")
	if w.LastErrorCode != "schema_failed" || strings.Contains(w.LastError, "42P07") {
		t.Errorf("the workspace says %s: %s", w.LastErrorCode, w.LastError)
	}
	tries := p.attemptsAt(op.GetOperationId(), provision.StepSchema, "do")
	if len(tries) < 2 {
		t.Fatalf("%d attempts", len(tries))
	}
	for _, a := range tries {
		if a.Error != "the workspace's schema was not applied" || !strings.Contains(a.Cause, "migration 2") ||
			!strings.Contains(a.Cause, "SQLSTATE 42P07") || a.ErrorLayer != "database" {
			t.Errorf("attempt %d: [%s] %q, cause %q", a.Attempt, a.ErrorLayer, a.Error, a.Cause)
		}
	}
}

// The schema's own database refuses a write that comes too late, and the write is not tried again: its run fails with
// that reason.
func TestAStaleWriteOfASchemaFailsAsWhatItIs(t *testing.T) {
	p := newCluster(t, clusterConfig{seats: 1, lease: 15 * time.Second})
	id := p.create(p.tenant(), "demo", byProcess)
	p.schemas(`UPDATE gpuaas_fence.schema SET epoch = epoch + 100 WHERE workspace_id = $1`, id)
	op, err := p.seats[0].ask(t.Context(), kRecreate, id)
	if err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, testkit.Patience, func() error {
		if len(p.attemptsAt(op.GetOperationId(), provision.StepSchema, "undo")) == 0 {
			return fmt.Errorf("the workspace is %s", p.workspace(id).State)
		}
		return nil
	})
	if tries := p.attemptsAt(op.GetOperationId(), provision.StepSchema, "do"); len(tries) != 1 ||
		tries[0].ErrorCode != "task_superseded" || tries[0].ErrorLayer != "database" {
		t.Errorf("the write that was refused is told as %+v", tries)
	}
	// The undo comes too late as well, for as long as the later write stands.
	testkit.Eventually(t, testkit.Patience, func() error {
		for _, a := range p.attemptsAt(op.GetOperationId(), provision.StepSchema, "undo") {
			if a.ErrorCode == "task_superseded" {
				return nil
			}
		}
		return fmt.Errorf("no undo was refused")
	})
	p.schemas(`UPDATE gpuaas_fence.schema SET epoch = 0 WHERE workspace_id = $1`, id)
	if w := p.rests(id, "failed"); w.LastErrorCode != "task_superseded" {
		t.Errorf("the workspace failed as %s: %s", w.LastErrorCode, w.LastError)
	}
}
