package operation

import (
	"testing"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/rpc"
)

// TestABoundPersonIsNoOperator: a person of a tenant who has the role operator as well gets nothing that concerns
// machines that several tenants share.
func TestABoundPersonIsNoOperator(t *testing.T) {
	p := newCluster(t, clusterConfig{seats: 1, lease: 15 * time.Second})
	id := p.create(p.tenant(), "demo", byProcess)
	tenantID := p.workspace(id).TenantID
	for name, tc := range map[string]struct {
		kind   commonv1.OperationKind
		change func(*lifecyclev1.RequestOperationRequest)
	}{
		"skip-undo":  {kind: kSkipUndo},
		"retry-undo": {kind: kRetryUndo},
		"override":   {kind: kDecommission, change: func(r *lifecyclev1.RequestOperationRequest) { r.Override = true }},
		"fenced proof": {kind: kRecreate, change: func(r *lifecyclev1.RequestOperationRequest) {
			r.FencedProof = commonv1.FencedProof_FENCED_PROOF_POWERED_OFF
		}},
	} {
		for who, person := range map[string]rpc.Person{
			"bound":    {Subject: "bea", TenantID: tenantID, Roles: []string{"operator", "security", "tenant", "viewer"}},
			"operator": {Subject: "olga", Roles: []string{"operator"}},
			"viewer":   {Subject: "vic", Roles: []string{"viewer"}},
		} {
			_, err := p.seats[0].ask(rpc.WithPerson(t.Context(), person), tc.kind, id,
				func(r *lifecyclev1.RequestOperationRequest) {
					r.DryRun = true
					if tc.change != nil {
						tc.change(r)
					}
				})
			if denied := fault.Has(err, commonv1.Reason_REASON_PERMISSION_DENIED); denied != (who != "operator") {
				t.Errorf("%s by a person who is %s: %v", name, who, err)
			}
		}
	}
}
