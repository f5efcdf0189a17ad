package operation

import (
	"testing"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/policy"
)

// TestTheLimitOfRetriesIsThePolicys: a workspace that has used two retries has a third by default, and none where the
// key allows two.
func TestTheLimitOfRetriesIsThePolicys(t *testing.T) {
	b := newBed(t, nil)
	op, err := b.create(t.Context(), b.tenant("acme"), "one", "k-1", 1)
	if err != nil {
		t.Fatal(err)
	}
	for _, sql := range []string{
		`UPDATE lifecycle.saga_run SET state = 'failed', finished_at = mesh.clock() WHERE workspace_id = $1`,
		`UPDATE lifecycle.workspace SET state = 'failed', reset_done = true, retry_used = 2 WHERE id = $1`,
	} {
		if _, err := b.db.OwnerPool().Exec(t.Context(), sql, op.GetWorkspaceId()); err != nil {
			t.Fatal(err)
		}
	}
	retry := func() error {
		_, err := b.server.RequestOperation(t.Context(), &lifecyclev1.RequestOperationRequest{
			Kind:   commonv1.OperationKind_OPERATION_KIND_RETRY,
			Target: &lifecyclev1.RequestOperationRequest_WorkspaceId{WorkspaceId: op.GetWorkspaceId()},
		})
		return err
	}
	set, err := policy.NewSet(map[string]string{policy.SagaRetryLimit: "2"})
	if err != nil {
		t.Fatal(err)
	}
	b.server.deps.Policy = policy.Fixed{Set: set}
	want(t, retry(), commonv1.Reason_REASON_RETRY_LIMIT_REACHED)
	b.server.deps.Policy = policy.Fixed{Set: policy.Defaults()}
	if err := retry(); err != nil {
		t.Errorf("a third retry by default: %v", err)
	}
}
