package operation

import (
	"fmt"
	"strings"
	"testing"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/lock"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/provision"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
)

// A proof that is given while a recreation is open goes to that recreation, or is refused: whatever the lock store
// answers, no proof is accepted and dropped.
func TestAProofIsNeverDropped(t *testing.T) {
	for name, tc := range map[string]struct {
		joins func(*testing.T) *lock.Lock
		held  lock.Kind
	}{
		"lock held":    {joins: redisLock, held: lock.Held},
		"lock unknown": {joins: func(*testing.T) *lock.Lock { return nil }, held: lock.Unknown},
	} {
		t.Run(name, func(t *testing.T) {
			joins := tc.joins(t)
			p := newCluster(t, clusterConfig{seats: 1, lease: 15 * time.Second, joins: func(int) *lock.Lock { return joins }})
			s := p.seats[0]
			p.machine("m1")
			tenant := p.tenant()
			id := p.create(tenant, "demo", byStatic)
			p.world.mu.Lock()
			p.world.mute = true
			p.world.mu.Unlock()
			if _, err := s.ask(t.Context(), kRecreate, id); err != nil {
				t.Fatal(err)
			}
			var run runs.Run
			testkit.Eventually(t, testkit.Patience, func() error {
				var err error
				if run, _, err = runs.Live(testkit.Context(t), s.pool, id); err == nil &&
					(run.StepName() != provision.StepPrevious || run.State != "waiting") {
					err = fmt.Errorf("the run is %s at %q", run.State, run.StepName())
				}
				return err
			})
			prove := func(id string, dry bool) (*lifecyclev1.Operation, error) {
				// Written again, so that the request finds it however long the test has taken.
				joins.Acquire(t.Context(), id, run.ID)
				if out := joins.Acquire(t.Context(), id, ids.New()); out.Kind != tc.held {
					t.Fatalf("the lock store says %v", out)
				}
				return s.ask(operator(t.Context()), kRecreate, id, func(r *lifecyclev1.RequestOperationRequest) {
					r.FencedProof, r.Reason, r.DryRun = commonv1.FencedProof_FENCED_PROOF_POWERED_OFF, "the rack is dark", dry
				})
			}
			refused := func(id string, reason commonv1.Reason) {
				t.Helper()
				for _, dry := range []bool{true, false} {
					op, err := prove(id, dry)
					want(t, err, reason)
					if f, ok := fault.As(err); !ok || len(f.Unmet) == 0 || f.Remedy == "" || f.ConflictingID == "" {
						t.Errorf("dry run %v: %v, %+v: it does not say what is missing", dry, op, f)
					}
				}
			}
			refused(id, commonv1.Reason_REASON_PRECONDITION_FAILED) // the machine answers
			res, err := s.server.RequestOperation(t.Context(), &lifecyclev1.RequestOperationRequest{
				Kind: commonv1.OperationKind_OPERATION_KIND_CREATE, Target: &lifecyclev1.RequestOperationRequest_Create{
					Create: &lifecyclev1.CreateWorkspace{
						Tenant: tenant, Name: "other",
						Spec: &lifecyclev1.WorkspaceSpec{Placement: byStatic, Gpus: 1},
					},
				},
			})
			if err != nil {
				t.Fatal(err)
			}
			// a create would not read a proof
			refused(res.GetOperation().GetWorkspaceId(), commonv1.Reason_REASON_OPERATION_IN_PROGRESS)

			p.world.mu.Lock()
			dark := p.world.instances["machine:m1"]
			delete(p.world.instances, "machine:m1")
			p.world.replica, p.world.mute = ids.New(), false
			p.world.mu.Unlock()
			p.beat(time.Hour)
			// with the attestation and no other machine, everything would be lost
			refused(id, commonv1.Reason_REASON_NO_CAPACITY)
			fresh := p.machine("m2")
			if op, err := prove(id, true); err != nil || !op.GetDryRun() || !strings.Contains(op.GetConsequence(), "proof") {
				t.Fatalf("the dry run says %v, %v", op, err)
			}
			if n := p.count(`SELECT count(*) FROM lifecycle.saga_run WHERE id = $1 AND input ? 'word'`, run.ID); n != 0 {
				t.Error("a dry run gave the proof")
			}
			op, err := prove(id, false)
			if err != nil || !op.GetJoined() || op.GetOperationId() != run.ID ||
				!strings.Contains(op.GetConsequence(), "proof") {
				t.Fatalf("the proof was answered with %v, %v", op, err)
			}
			if w := p.rests(id, "active"); w.NodeID != fresh || w.RunID != run.ID {
				t.Errorf("it is on %s by run %s", w.NodeID, w.RunID)
			}
			if n := p.count(`SELECT count(*) FROM lifecycle.saga_run
				WHERE id = $1 AND input->'word'->>'fenced_proof' = 'powered_off'
				AND input->'word'->>'reason' = 'the rack is dark'`, run.ID); n != 1 {
				t.Error("the proof is not on record with the run")
			}
			if n := p.count(`SELECT count(*) FROM lifecycle.resource_claim
				WHERE workspace_id = $1 AND node_id = $2 AND orphaned_at IS NOT NULL AND released_at IS NULL
				AND orphaned_by LIKE '%olga%' AND orphan_reason LIKE '%powered_off%dark%'`, id, dark.node); n == 0 {
				t.Error("nothing of the dark machine is an orphan by the operator's word")
			}
			p.never("a proof for a run that is open")
		})
	}
}
