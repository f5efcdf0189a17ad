package identity

import (
	"context"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/services/recovery/identity/judge"
	"github.com/gpuaas/mesh/services/recovery/wave"
)

// suspects are the refusals of a batch that follow from records which recovery does not have.
type suspects struct {
	list    []wave.Suspect
	denials []**commonv1.Denial
}

// add adds a refusal if it follows from a missing record: of the node, or of a certificate that the authority has
// signed. Revoked and replaced certificates are on record and do not count.
func (s *suspects) add(nodeID string, reason commonv1.Reason, use judge.CertificateUse, denial **commonv1.Denial) {
	switch reason { // the others rest on what is on record
	case commonv1.Reason_REASON_IDENTITY_UNKNOWN:
	case commonv1.Reason_REASON_SERIAL_UNKNOWN:
		if use.State != commonv1.SerialState_SERIAL_STATE_UNSPECIFIED {
			return
		}
	default:
		return
	}
	s.list, s.denials = append(s.list, wave.Suspect{NodeID: nodeID, Reason: reason}), append(s.denials, denial)
}

// brake turns the refusals into denials that make the nodes wait, if they are part of a wave. In rollback mode the
// nodes wait already, and do not count.
func (s *suspects) brake(ctx context.Context, tx pgx.Tx, limits wave.Limits, m Moment) error {
	if m.RolledBack {
		return nil
	}
	braked, err := wave.Record(ctx, tx, limits, s.list)
	if err != nil || !braked {
		return err
	}
	for _, d := range s.denials {
		*d = denial(ctx, commonv1.Reason_REASON_RECORDS_MISSING)
	}
	return nil
}

// limits returns the limits of a wave of refusals.
func (s *Identities) limits() wave.Limits { return wave.LimitsOf(s.deps.Policy) }

// brakeHold returns the reason with which a node is refused whose challenge proved reason. A lost join state may be
// recovery's own loss: if many nodes are affected, the node waits in place of being put on hold. A copy is put on hold
// in any case.
func (s *Identities) brakeHold(ctx context.Context, tx pgx.Tx, r *Record, reason commonv1.Reason) (commonv1.Reason,
	error,
) {
	if reason != commonv1.Reason_REASON_JOIN_STATE_LOST {
		return reason, nil
	}
	braked, err := wave.Record(ctx, tx, s.limits(), []wave.Suspect{{NodeID: r.NodeID, Reason: reason}})
	if err != nil {
		return reason, err
	}
	if braked {
		reason = commonv1.Reason_REASON_RECORDS_MISSING
	}
	return reason, nil
}
