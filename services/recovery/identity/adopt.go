package identity

import (
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/joinstate"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/services/recovery/identity/joinkeys"
	"github.com/gpuaas/mesh/services/recovery/identity/judge"
	"github.com/gpuaas/mesh/services/recovery/rollback"
)

// adopt takes over what a node has and the database has lost: its generation, and if the verdict says so the
// certificate.
func (b *opening) adopt(tx pgx.Tx, r *Record, o *recoveryv1.OpenSession, p judge.Presented, v judge.Verdict) error {
	rolledBack := v.Reason == commonv1.Reason_REASON_CONTROL_PLANE_ROLLBACK
	if !rolledBack && !v.AdoptSerial {
		return nil
	}
	if rolledBack {
		b.evidence = append(b.evidence, evidenceOf(r, p, v))
		if shown, err := joinstate.KeyID(o.GetJoinState()); err == nil {
			r.JoinKeys = joinkeys.With(r.JoinKeys, shown) // the node keeps this join state until it confirms the next
		}
		r.StateBy, r.StateReason, r.StateAt = "recovery", names.Of(v.Reason), b.moment.Now
		b.rolledBack = append(b.rolledBack, r)
	}
	if v.Adopt > 0 {
		r.Issued, r.Confirmed = max(r.Issued, v.Adopt), v.Adopt
		r.ConfirmedSession, r.ReplacedNonce = "", ""
	}
	if v.AdoptSerial {
		if err := b.adoptSerial(tx, r, o); err != nil {
			return err
		}
	}
	if !slices.Contains(b.changed, r) {
		b.changed = append(b.changed, r)
	}
	return nil
}

// adoptSerial makes the connection's certificate the node's next one.
func (b *opening) adoptSerial(tx pgx.Tx, r *Record, o *recoveryv1.OpenSession) error {
	s, known := b.serials[o.GetSerial()]
	if known {
		if err := offerAgain(b.ctx, tx, r, s.Serial); err != nil {
			return err
		}
	} else {
		// The certificate's validity is not known here; its connection is cut when the certificate expires.
		s = Serial{
			Serial: o.GetSerial(), NotBefore: b.moment.Now, NotAfter: b.moment.Now.Add(24 * time.Hour),
			ChainPEM: []byte{},
		}
		var err error
		if s.KeySHA256, err = adoptableKey(b.ctx, tx, r, o); err != nil {
			return err
		}
		if err := Offer(b.ctx, tx, r, s); err != nil {
			return err
		}
	}
	s.NodeID, s.InstanceID, s.State = r.NodeID, r.InstanceID, commonv1.SerialState_SERIAL_STATE_NEXT
	b.serials[s.Serial] = s
	return nil
}

// evidenceOf returns the evidence of a rollback in what a node presented: a generation, or a certificate, that the
// database does not have.
func evidenceOf(r *Record, p judge.Presented, v judge.Verdict) rollback.Evidence {
	e := rollback.Evidence{
		Kind: recoveryv1.RollbackEvidenceKind_ROLLBACK_EVIDENCE_KIND_NODE_AHEAD, Subject: r.NodeID,
		Remembered: p.Generation, Known: r.Issued, Era: p.Era,
	}
	e.Detail = fmt.Sprintf("node %s shows a certificate of its own that the database does not know", r.Name)
	if v.Adopt > 0 {
		e.Detail = fmt.Sprintf("node %s shows generation %d of era %d; the database has issued %d",
			r.Name, p.Generation, p.Era, r.Issued)
	}
	return e
}

// report records the evidence of the batch. If that sets rollback mode, the refusals of this very batch are softened as
// in the mode.
func (b *opening) report(tx pgx.Tx) error {
	if len(b.evidence) == 0 {
		return nil
	}
	// Numbers of an earlier era are expected after a restore that was declared: outside of the mode there is nothing to
	// write, and no lock to take.
	news := func(e rollback.Evidence) bool { return e.Era >= b.moment.Era }
	if !b.moment.RolledBack && !slices.ContainsFunc(b.evidence, news) {
		return nil
	}
	mode, set, err := rollback.Record(b.ctx, tx, b.evidence...)
	if err != nil {
		return err
	}
	if !set {
		return nil
	}
	b.mode, b.moment.RolledBack = mode, true
	for _, result := range b.results {
		if d := result.GetDenial(); d != nil {
			result.Denial = b.refusal(d.GetReason())
		}
	}
	return nil
}
