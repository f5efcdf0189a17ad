package identity

import (
	"context"
	"maps"
	"slices"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/services/recovery/actions"
)

// The alarms that an identity may have until a person has decided.
const (
	AlarmNone       = ""
	AlarmClone      = "cloned_identity_detected"
	AlarmJoinState  = "join_state_lost"
	AlarmTokenReuse = "token_reuse"
)

// copied are the alarms that a copied identity raises, and the reasons of the verdicts on them.
var copied = map[string]commonv1.DriftReason{
	AlarmClone:      commonv1.DriftReason_DRIFT_REASON_CLONED_IDENTITY_DETECTED,
	AlarmTokenReuse: commonv1.DriftReason_DRIFT_REASON_TOKEN_REUSE,
}

// Copied reports whether an alarm says that two hosts may have the node's identity.
func Copied(alarm string) bool {
	_, ok := copied[alarm]
	return ok
}

// noteActions writes what the decisions about records mean for the recovery actions of their nodes: a hold for a copied
// identity begins one, and any other decision takes the place of what was done for the node. Only an enrolment, and the
// reactivation of a node, leave them as they are.
func noteActions(ctx context.Context, tx pgx.Tx, records []*Record) error {
	var decided []*Record
	var nodeIDs []string
	for _, r := range records {
		if r.decided == "" || r.decided == actionEnrol || r.State == commonv1.NodeIdentityState_NODE_IDENTITY_STATE_ACTIVE {
			continue
		}
		decided, nodeIDs = append(decided, r), append(nodeIDs, r.NodeID)
	}
	if len(decided) == 0 {
		return nil
	}
	book, err := actions.Open(ctx, tx, nodeIDs...)
	if err != nil {
		return err
	}
	for _, r := range decided {
		what := names.Of(r.State) + " by " + r.StateBy + ": " + r.StateReason
		held := r.State == commonv1.NodeIdentityState_NODE_IDENTITY_STATE_HELD
		switch reason, isCopy := copied[r.Alarm]; {
		case held && isCopy:
			book.Decided(r.NodeID, what, actions.Fencing)
			r.fencing(ctx, book, reason)
		case held && r.Alarm == AlarmJoinState: // its recovery token ends this hold
		case held:
			book.Decided(r.NodeID, what, actions.Fencing)
		default:
			book.Decided(r.NodeID, what)
		}
	}
	return book.Save(ctx, tx)
}

// fencing begins the action of a hold for a copied identity, whose effect the hold is.
func (r *Record) fencing(ctx context.Context, book *actions.Book, reason commonv1.DriftReason) {
	a := book.Begin(actions.Beginning{
		NodeID: r.NodeID, Kind: actions.Fencing, Reason: reason, Requester: r.StateBy, RejectedAt: book.Now(),
		CorrelationID: obs.From(ctx).CorrelationID,
	})
	if a != nil {
		a.TakeEffect(book.Now(), "put on hold: "+r.StateReason)
		r.correlated = a.Correlation()
	}
}

// correlate adds to the results of admitted sessions, by node, the correlation ids of the recovery actions that brought
// their certificates and go on.
func correlate(ctx context.Context, tx pgx.Tx, admitted map[string]*recoveryv1.ConfirmResult) error {
	if len(admitted) == 0 {
		return nil
	}
	found, err := actions.OfSessions(ctx, tx, slices.Collect(maps.Keys(admitted)))
	if err != nil {
		return err
	}
	for _, c := range found {
		admitted[c.NodeID].CorrelationId = c.CorrelationID
	}
	return nil
}

// noteSessions notes on recovery actions the first sessions on the certificates that they have brought. What is written
// about their nodes gets the correlation ids of the actions.
func noteSessions(ctx context.Context, tx pgx.Tx, list []promotion, first []string) error {
	records := map[string]*Record{}
	var nodeIDs []string
	for _, p := range list {
		if slices.Contains(first, p.serial) {
			records[p.record.NodeID], nodeIDs = p.record, append(nodeIDs, p.record.NodeID)
		}
	}
	if len(nodeIDs) == 0 {
		return nil
	}
	found, err := actions.NoteSessions(ctx, tx, nodeIDs)
	if err != nil {
		return err
	}
	for _, c := range found {
		records[c.NodeID].correlated = c.CorrelationID
	}
	return nil
}
