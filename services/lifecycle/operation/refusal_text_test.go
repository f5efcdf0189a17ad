package operation

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

// A refusal states the fact that prevents the operation, not the condition that would have to hold; and each refusal
// has a remedy.
func TestRefusalsReadAsWhatIsMissing(t *testing.T) {
	d := roomy(t)
	unmet := map[string]map[commonv1.OperationKind]string{
		"active": {
			kReset: "the workspace is active, not failed", kRetry: "the workspace is active, not failed",
			kCancel: "no operation is open to cancel", kRetryUndo: "no operation is open to retry undo",
			kSkipUndo: "no operation is open to skip undo",
		},
		"failed": {
			kRetry: "the workspace has not been reset since it failed", kCancel: "no operation is open to cancel",
		},
		"decommissioned": {
			kReset:        "the workspace is decommissioned, not failed",
			kDecommission: "the workspace is decommissioned, not active, failed or stuck",
			kRecreate:     "the workspace is decommissioned, not active or failed",
		},
		"creating": {
			kReset: "operation RUN (create) is open and", kDecommission: "operation RUN (create) is open and",
			kRetryUndo: "not stuck", kSkipUndo: "not stuck",
		},
		"creating, undone": {
			kDecommission: "operation RUN (create) is open and compensating", kRetry: "operation RUN (create) is open and " +
				"compensating",
		},
		"creating, stuck": {kCancel: "the operation is stuck: ", kRetry: "operation RUN (create) is open and stuck"},
	}
	for state, kinds := range unmet {
		for _, kind := range []commonv1.OperationKind{
			kReset, kRetry, kCancel, kRetryUndo, kSkipUndo, kDecommission,
			kRecreate,
		} {
			id, _ := d.put(state)
			var run string
			if err := d.db.OwnerPool().QueryRow(t.Context(),
				`SELECT coalesce(run_id::text, '') FROM lifecycle.workspace WHERE id = $1`, id).Scan(&run); err != nil {
				t.Fatal(err)
			}
			_, err := d.server.RequestOperation(t.Context(), &lifecyclev1.RequestOperationRequest{
				Kind: kind, Target: &lifecyclev1.RequestOperationRequest_WorkspaceId{WorkspaceId: id}, Reason: "why",
			})
			want, refused := kinds[kind]
			f, ok := fault.As(err)
			what := state + ": " + names.Of(kind)
			if !ok {
				if refused {
					t.Errorf("%s is not refused: %v", what, err)
				}
				continue
			}
			general := fault.RowOf(commonv1.Reason_REASON_PRECONDITION_FAILED).Remedy
			if f.Remedy == "" || f.Remedy == general {
				t.Errorf("%s: no remedy of its own: %v, %q", what, err, f.Remedy)
			}
			_, err = d.server.RequestOperation(t.Context(), &lifecyclev1.RequestOperationRequest{
				Kind: kind, Target: &lifecyclev1.RequestOperationRequest_WorkspaceId{WorkspaceId: id}, Reason: "why", DryRun: true,
			})
			if dry, ok := fault.As(err); ok && (dry.Remedy == "" || dry.Remedy == general) {
				t.Errorf("%s, dry run: no remedy of its own: %v, %q", what, err, dry.Remedy)
			}
			if refused && !strings.Contains(strings.Join(f.Unmet, "; "), strings.ReplaceAll(want, "RUN", run)) {
				t.Errorf("%s: unmet are %q, want %q", what, f.Unmet, want)
			}
			for _, u := range f.Unmet {
				if strings.Contains(u, "; it is ") || strings.HasSuffix(u, " has ended") {
					t.Errorf("%s: what would have to be is shown as what stands in the way: %q", what, u)
				}
			}
		}
		// The table of actions has the same text.
		id, _ := d.put(state)
		res, err := d.server.GetActions(t.Context(), &lifecyclev1.GetActionsRequest{WorkspaceId: id})
		if err != nil {
			t.Fatal(err)
		}
		word, _, _ := strings.Cut(state, ",")
		for _, a := range res.GetActions() {
			for _, u := range a.GetUnmet() {
				if strings.Contains(u, "; it is ") || strings.HasSuffix(u, " has ended") || u == "the workspace is failed" &&
					word == "failed" ||
					u == "an operation is open" || u == "the operation is stuck" && word != "creating" {
					t.Errorf("%s: %s: what would have to be is shown as what stands in the way: %q", state, names.Of(a.GetKind()), u)
				}
			}
		}
	}
	// A decommission in mid-provisioning is told what to wait for, which must not contradict when to send the request
	// again.
	id, _ := d.put("creating")
	_, err := d.server.RequestOperation(t.Context(), &lifecyclev1.RequestOperationRequest{
		Kind: kDecommission, Target: &lifecyclev1.RequestOperationRequest_WorkspaceId{WorkspaceId: id}, Reason: "why",
	})
	if f, _ := fault.As(err); f == nil || strings.Contains(f.Remedy, "minutes") ||
		!strings.Contains(f.Remedy, "workspaces wait WS --for state=failed") {
		t.Errorf("decommission in mid-run: %v", err)
	}
	reset := func(state string) *fault.Error {
		id, _ := d.put(state)
		_, err := d.server.RequestOperation(t.Context(), &lifecyclev1.RequestOperationRequest{
			Kind: kReset, Target: &lifecyclev1.RequestOperationRequest_WorkspaceId{WorkspaceId: id},
		})
		f, _ := fault.As(err)
		return f
	}
	if f := reset("active"); f == nil || len(f.Unmet) != 1 || f.Unmet[0] != "the workspace is active, not failed" ||
		!strings.Contains(f.Remedy, "recreate") {
		t.Errorf("reset of one that is active: %+v", f)
	}
	if f := reset("creating"); f == nil || !strings.HasPrefix(f.Remedy, "cancel it") {
		t.Errorf("reset in mid-run: %+v", f)
	}
	// A caller who has cancelled already is not told to cancel.
	if f := reset("creating, undone"); f == nil || strings.Contains(f.Remedy, "cancel it") ||
		!strings.Contains(f.Remedy, "wait") {
		t.Errorf("reset in mid-undo: %+v", f)
	}
}

// The table has the consequence of a request that would begin nothing, the resources that it would adopt, and the
// advice about one more retry.
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
		if got := said(id, kind); !strings.HasPrefix(got, "begins nothing: it joins operation ") ||
			!strings.HasSuffix(got, " (create), which is under way") {
			t.Errorf("%s in mid-run: %q", names.Of(kind), got)
		}
	}
	id, _ = d.put("failed, reset")
	if got := said(id, kRetry); !strings.Contains(got, "nothing is left") || strings.Contains(got, "decommission") {
		t.Errorf("a retry of one that is clean: %q", got)
	}
	if got := said(id, kRecreate); !strings.HasPrefix(got, "provisions the next epoch: no instance") {
		t.Errorf("a recreation of one that is clean: %q", got)
	}
	fails := func() {
		d.sql(`UPDATE lifecycle.saga_run
			SET state = 'failed', finished_at = mesh.clock(), why_waiting = '', error_code = 'workload_failed', error_step = 4
			WHERE workspace_id = $1 AND finished_at IS NULL`, id)
		d.sql(`UPDATE lifecycle.workspace SET state = 'failed', state_at = mesh.clock() WHERE id = $1`, id)
	}
	for range 2 {
		d.do(kRetry, id)
		fails()
		d.do(kReset, id)
	}
	d.sql(`INSERT INTO lifecycle.resource_claim (id, workspace_id, tenant_id, run_id, step, epoch, kind,
		deterministic_name, scope)
		SELECT gen_random_uuid(), w.id, w.tenant_id, w.run_id, 3, w.epoch, 'schema', 't_x', 'shared'
			FROM lifecycle.workspace w WHERE w.id = $1`, id)
	got := said(id, kRetry)
	if !strings.Contains(got, "adopts what is there: schema") ||
		!strings.Contains(got, "failed with workload_failed twice") || !strings.Contains(got, "decommission") {
		t.Errorf("a retry after the same failure twice: %q", got)
	}
	// A retry that begins has no consequence, and the same advice.
	res, err := d.server.RequestOperation(t.Context(), &lifecyclev1.RequestOperationRequest{
		Kind: kRetry, Target: &lifecyclev1.RequestOperationRequest_WorkspaceId{WorkspaceId: id},
	})
	if err != nil {
		t.Fatal(err)
	}
	if op := res.GetOperation(); op.GetConsequence() != "" ||
		!strings.Contains(op.GetAdvice(), "failed with workload_failed twice") {
		t.Errorf("the retry itself: %v", op)
	}
}

// A request that destroys something for good needs a reason; a dry run does not, and its answer has nothing that looks
// like a begun operation.
func TestDestructiveOperationsNeedAReason(t *testing.T) {
	d := roomy(t)
	for _, kind := range []commonv1.OperationKind{kDecommission, kRecreate, kSkipUndo} {
		state := "active"
		if kind == kSkipUndo {
			state = "creating, stuck"
		}
		id, _ := d.put(state)
		traces := func() string {
			var text string
			err := d.db.OwnerPool().QueryRow(t.Context(),
				`SELECT w.version || '/' || w.state || '/' || (SELECT count(*) FROM lifecycle.saga_run r
					WHERE r.workspace_id = w.id)
				FROM lifecycle.workspace w WHERE w.id = $1`, id).Scan(&text)
			if err != nil {
				t.Fatal(err)
			}
			return text
		}
		before := traces()
		ask := func(reason string, dry bool) (*lifecyclev1.Operation, error) {
			res, err := d.server.RequestOperation(t.Context(), &lifecyclev1.RequestOperationRequest{
				Kind: kind, Target: &lifecyclev1.RequestOperationRequest_WorkspaceId{WorkspaceId: id}, Reason: reason, DryRun: dry,
			})
			return res.GetOperation(), err
		}
		for _, reason := range []string{"", "  "} {
			_, err := ask(reason, false)
			if f, ok := fault.As(err); !ok || f.Reason != commonv1.Reason_REASON_REASON_REQUIRED ||
				!strings.Contains(f.Remedy, "--reason") {
				t.Errorf("%s for the reason %q: %v", names.Of(kind), reason, err)
			}
		}
		op, err := ask("", true)
		if err != nil || op.GetOperationId() != "" || op.GetEpoch() != 0 || !op.GetDryRun() || op.GetConsequence() == "" {
			t.Errorf("a dry run of %s: %v, %v", names.Of(kind), op, err)
		}
		if now := traces(); now != before {
			t.Errorf("%s was refused and changed %s to %s", names.Of(kind), before, now)
		}
		if op, err := ask("it is over", false); err != nil || op.GetOperationId() == "" {
			t.Errorf("%s with a reason: %v, %v", names.Of(kind), op, err)
		}
	}
}
