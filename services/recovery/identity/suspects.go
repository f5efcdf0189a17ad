package identity

import (
	"context"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/services/recovery/wave"
)

// suspects is the refusals of a batch that rest on records which recovery does not have.
type suspects struct {
	list    []wave.Suspect
	denials []**commonv1.Denial
}

// add takes a refusal in if it rests on a record that is missing: of the node, or of a certificate that the authority has signed. A revoked certificate and
// one that was replaced are on record.
func (s *suspects) add(nodeID string, reason commonv1.Reason, use CertificateUse, denial **commonv1.Denial) {
	switch reason { //nolint:exhaustive // the others rest on what is on record
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

// judge tells the nodes to wait if they are part of a wave. In rollback mode they wait already, and count for nothing.
func (s *suspects) judge(ctx context.Context, tx pgx.Tx, limits wave.Limits, m Moment) error {
	if m.RolledBack {
		return nil
	}
	braked, err := wave.Judge(ctx, tx, limits, s.list)
	if err != nil || !braked {
		return err
	}
	for _, d := range s.denials {
		*d = denial(ctx, commonv1.Reason_REASON_RECORDS_MISSING)
	}
	return nil
}

// limits returns those of a wave.
func (s *Identities) limits() wave.Limits { return wave.LimitsOf(s.deps.Policy) }

// brakeHold returns what becomes of a node whose challenge proved reason. A join state that is lost may be lost to us: among many the node waits in place of
// being put on hold. A copy is put on hold whatever happens to others.
func (s *Identities) brakeHold(ctx context.Context, tx pgx.Tx, r *Record, reason commonv1.Reason) (commonv1.Reason, error) {
	if reason != commonv1.Reason_REASON_JOIN_STATE_LOST {
		return reason, nil
	}
	braked, err := wave.Judge(ctx, tx, s.limits(), []wave.Suspect{{NodeID: r.NodeID, Reason: reason}})
	if err != nil {
		return reason, err
	}
	if braked {
		reason = commonv1.Reason_REASON_RECORDS_MISSING
	}
	return reason, nil
}
