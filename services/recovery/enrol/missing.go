package enrol

import (
	"cmp"
	"context"
	"crypto/sha256"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/audit"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/services/recovery/enrol/tokenless"
)

// refuseMissing refuses a host that says that it has no recovery token to send. It changes no node. Of a caller that
// has proven to be the node there is an event, which is evidence about the node; of any other one the event is marked
// as unverified, and is evidence of nothing. Both get the same answer.
func (e *Enroller) refuseMissing(ctx context.Context, req *recoveryv1.EnrollRequest, who *audit.Entry) error {
	claim := req.GetTokenMissing()
	who.Details["claimed_node_id"] = claim.GetNodeId()
	// As with tokens, a caller that cannot sign for the node cannot empty the bucket of one that can.
	sum := sha256.Sum256(claim.GetProof())
	if err := e.perProof.Allow(string(sum[:]), time.Now()); err != nil {
		return err
	}
	proven, err := tokenless.Proven(ctx, e.deps.Pool, claim)
	if err != nil {
		return err
	}
	var refusal error = fault.New(commonv1.Reason_REASON_RECOVERY_TOKEN_MISSING, "")
	if proven { // Enroll reports it
		who.SubjectType, who.SubjectID, who.NodeID = "node", claim.GetNodeId(), claim.GetNodeId()
		who.Actor = "node/" + claim.GetNodeId()
		return cmp.Or(e.allowNode(claim.GetNodeId()), refusal)
	}
	// All unproven claims share one bucket, whose key is no node: their senders choose addresses, keys and nodes.
	if err := e.perNode.Allow("unproven claims", time.Now()); err != nil {
		return err
	}
	e.reportRefusal(correlated(ctx, req.GetCorrelationId()), attempt{
		nodeID: claim.GetNodeId(), way: KindRecovery, unverified: true, keyLost: claim.GetKeyLost(),
	}, refusal)
	return refusal
}
