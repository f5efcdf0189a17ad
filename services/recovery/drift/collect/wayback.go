package collect

import (
	"context"
	"slices"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/internal/policy/policystore"
	"github.com/gpuaas/mesh/services/recovery/drift"
	"github.com/gpuaas/mesh/services/recovery/tokens"
)

// topicWayBack is the topic of what recovery's own records say about whether a node can enrol again by itself.
const topicWayBack = "way_back"

// wayBack is whether a node can enrol again by itself; the zero value: it was not looked up.
type wayBack struct {
	known  bool
	reason commonv1.DriftReason // why it cannot; unspecified: it can
	detail string
}

// findWaysBack looks up whether the nodes whose certificates the ingress refuses can enrol again by themselves. An
// agent that cannot sends no attempt that would tell.
func findWaysBack(ctx context.Context, tx pgx.Tx, changes []change, nodes map[string]*Node) error {
	var refused []*claim
	var of []string
	for _, c := range changes {
		if c.claim == nil || nodes[c.nodeID] == nil {
			continue
		}
		e, ok := c.claim.evidence(0)
		if !ok || e.Part != commonv1.DriftPart_DRIFT_PART_CERTIFICATE {
			continue
		}
		refused = append(refused, c.claim)
		if !slices.Contains(of, c.nodeID) {
			of = append(of, c.nodeID)
		}
	}
	if len(refused) == 0 {
		return nil
	}
	values, err := policystore.Load(tx)(ctx)
	if err != nil {
		return err
	}
	set, _ := policy.NewSet(values) // a value out of its bounds counts as its default, as it does everywhere
	usable, err := tokens.Usable(ctx, tx, of, set.RecoveryTokenMaxAge())
	if err != nil {
		return err
	}
	for _, c := range refused {
		c.way = wayBack{known: true}
		switch {
		case !slices.Contains(usable, c.fact.GetClaimedNodeId()):
			c.way.reason = commonv1.DriftReason_DRIFT_REASON_RECOVERY_TOKEN_MISSING
			c.way.detail = "recovery has no token of the node that it would accept"
		case !set.AutoRecovery():
			c.way.reason = commonv1.DriftReason_DRIFT_REASON_RECOVERY_ENROLLMENT_BLOCKED
			c.way.detail = "automatic recovery is off by the policy (" + policy.AutoRecovery + ")"
		}
	}
	return nil
}

// cannotReturn keeps whether a node whose certificate is refused can enrol again by itself. It counts as long as the
// refusal does.
func (n *Node) cannotReturn(w wayBack, refused drift.Evidence) {
	if !w.known {
		return
	}
	e := drift.Evidence{
		NodeID: n.NodeID, Part: commonv1.DriftPart_DRIFT_PART_CERTIFICATE, Source: drift.FromEnrolment, Reason: w.reason,
		Detail: w.detail, ObservedAt: refused.ObservedAt, CorrelationID: refused.CorrelationID,
	}
	if w.reason != 0 {
		e.FreshUntil = refused.FreshUntil
	}
	n.NoteTopic(topicWayBack, e)
}
