package workspace

import (
	"strings"
	"testing"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
)

// roomy is a desk whose tenant has room for whatever a test makes.
func roomy(t *testing.T) *desk {
	t.Helper()
	d := &desk{bed: newBed(t, nil)}
	_, err := d.server.CreateTenant(t.Context(), &lifecyclev1.CreateTenantRequest{
		Name: "acme", Quota: &lifecyclev1.Quota{Workspaces: 1000, Gpus: 1000, StorageBytes: 1 << 60},
	})
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// What is unmet is what is to hold, never what holds; and each refusal says what to do in its place.
func TestRefusalsReadAsWhatIsMissing(t *testing.T) {
	d := roomy(t)
	for _, state := range []string{"active", "failed", "decommissioned", "creating", "creating, undone", "creating, stuck"} {
		for _, kind := range []commonv1.OperationKind{kReset, kRetry, kCancel, kRetryUndo, kDecommission, kRecreate} {
			id, _ := d.put(state)
			_, err := d.server.RequestOperation(t.Context(), &lifecyclev1.RequestOperationRequest{
				Kind: kind, Target: &lifecyclev1.RequestOperationRequest_WorkspaceId{WorkspaceId: id}, Reason: "why",
			})
			f, ok := fault.As(err)
			if !ok {
				continue
			}
			what := state + ": " + names.Of(kind)
			word, _, _ := strings.Cut(state, ",")
			for _, u := range f.Unmet {
				if u == "the workspace is "+word {
					t.Errorf("%s: what holds is shown as unmet: %q", what, u)
				}
			}
			if f.Remedy == "" {
				t.Errorf("%s: no remedy: %v", what, err)
			}
		}
	}
	reset := func(state string) *fault.Error {
		id, _ := d.put(state)
		_, err := d.server.RequestOperation(t.Context(), &lifecyclev1.RequestOperationRequest{
			Kind: kReset, Target: &lifecyclev1.RequestOperationRequest_WorkspaceId{WorkspaceId: id},
		})
		f, _ := fault.As(err)
		return f
	}
	if f := reset("active"); f == nil || len(f.Unmet) != 1 || f.Unmet[0] != "the workspace is failed; it is active" || !strings.Contains(f.Remedy, "recreate") {
		t.Errorf("reset of one that is active: %+v", f)
	}
	if f := reset("creating"); f == nil || !strings.HasPrefix(f.Remedy, "cancel it") {
		t.Errorf("reset in mid-run: %+v", f)
	}
	// Who has cancelled already is not told to cancel.
	if f := reset("creating, undone"); f == nil || strings.Contains(f.Remedy, "cancel it") || !strings.Contains(f.Remedy, "wait") {
		t.Errorf("reset in mid-undo: %+v", f)
	}
}

// The table says what a request would do where it would begin nothing, what there is to adopt, and what to think of one more retry.
func TestConsequencesAreThoseOfTheMoment(t *testing.T) {
	d := roomy(t)
	said := func(id string, kind commonv1.OperationKind) string {
		t.Helper()
		res, err := d.server.GetActions(t.Context(), &lifecyclev1.GetActionsRequest{WorkspaceId: id})
		if err != nil {
			t.Fatal(err)
		}
		for _, a := range res.GetActions() {
			if a.GetKind() == kind {
				return a.GetConsequence()
			}
		}
		t.Fatalf("no row for %v", kind)
		return ""
	}
	id, _ := d.put("creating")
	for _, kind := range []commonv1.OperationKind{kRetry, kRecreate} {
		if got := said(id, kind); !strings.HasPrefix(got, "begins nothing: it joins operation ") || !strings.HasSuffix(got, " (create), which is under way") {
			t.Errorf("%s in mid-run: %q", names.Of(kind), got)
		}
	}
	id, _ = d.put("failed, reset")
	if got := said(id, kRetry); !strings.Contains(got, "nothing is left") || strings.Contains(got, "decommission") {
		t.Errorf("a retry of one that is clean: %q", got)
	}
	if got := said(id, kRecreate); !strings.HasPrefix(got, "provisions the next epoch: no box") {
		t.Errorf("a recreation of one that is clean: %q", got)
	}
	fails := func() {
		d.sql(`UPDATE lifecycle.saga_run SET state = 'failed', finished_at = mesh.clock(), why_waiting = '', error_code = 'workload_failed', error_step = 4
			WHERE workspace_id = $1 AND finished_at IS NULL`, id)
		d.sql(`UPDATE lifecycle.workspace SET state = 'failed', state_at = mesh.clock() WHERE id = $1`, id)
	}
	for range 2 {
		d.do(kRetry, id)
		fails()
		d.do(kReset, id)
	}
	d.sql(`INSERT INTO lifecycle.resource_claim (id, workspace_id, tenant_id, run_id, step, epoch, kind, deterministic_name, scope)
		SELECT gen_random_uuid(), w.id, w.tenant_id, w.run_id, 3, w.epoch, 'schema', 't_x', 'shared' FROM lifecycle.workspace w WHERE w.id = $1`, id)
	got := said(id, kRetry)
	if !strings.Contains(got, "adopts what is there: schema") || !strings.Contains(got, "failed with workload_failed twice") || !strings.Contains(got, "decommission") {
		t.Errorf("a retry after the same failure twice: %q", got)
	}
	// One that begins has no forecast, and the same advice.
	res, err := d.server.RequestOperation(t.Context(), &lifecyclev1.RequestOperationRequest{
		Kind: kRetry, Target: &lifecyclev1.RequestOperationRequest_WorkspaceId{WorkspaceId: id},
	})
	if err != nil {
		t.Fatal(err)
	}
	if op := res.GetOperation(); op.GetConsequence() != "" || !strings.Contains(op.GetAdvice(), "failed with workload_failed twice") {
		t.Errorf("the retry itself: %v", op)
	}
}
