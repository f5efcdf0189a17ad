package identity

import (
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
)

// Form is what kind of join state a Hello carried.
type Form int

// The forms. Foreign is validly signed for another instance of the same node: what an agent that enrolled anew may still
// hold. UnknownKey names a signing key that this replica does not hold.
const (
	FormAbsent Form = iota
	FormUnreadable
	FormUnknownKey
	FormForeign
	FormSigned
)

// Presented is the join state of a Hello after its signature was verified.
type Presented struct {
	Form       Form
	Generation int64
	Era        int64
	Serial     string // for which it was signed
	KeyID      string // of FormUnknownKey
}

// CertificateUse is what recovery knows of the certificate a connection was opened with.
type CertificateUse struct {
	State commonv1.SerialState // unspecified: not one that we issued to this instance
	Used  bool                 // a session has been ready on it
	// Unreadable says that it was issued to this instance, and that this build does not know its state.
	Unreadable bool
}

// Hello is one attempt to open a session, as far as it decides.
type Hello struct {
	InstanceID  string
	Serial      string // of the connection's certificate
	Presented   Presented
	Certificate CertificateUse
}

// Standing is what is known of a node instance, under the lock on its row.
type Standing struct {
	State         commonv1.NodeIdentityState
	InstanceID    string
	Issued        int64 // last generation issued
	Confirmed     int64 // the generation whose session is offered work
	Era           int64 // of the database
	CurrentSerial string
	NextSerial    string
	// Ended is what a retired instance is told in place of identity_retired; unspecified for a machine.
	Ended commonv1.Reason
}

// Ruling is what becomes of a Hello.
type Ruling int

// The rulings. Welcome issues the next generation. Challenge asks for a signature first. Deny closes.
const (
	RulingDeny Ruling = iota
	RulingWelcome
	RulingChallenge
)

// Verdict is Judge's answer.
type Verdict struct {
	Ruling Ruling
	// Reason of a denial; of a challenge, what a signed answer proves: cloned_identity_detected or join_state_lost; of a welcome,
	// control_plane_rollback if the database went back in time, else unspecified.
	Reason commonv1.Reason
	// Adopt is the generation to take over before issuing, because the node remembers more than the database does. Zero: none.
	Adopt int64
	// AdoptSerial says that the connection's certificate is taken over with it.
	AdoptSerial bool
}

// Judge decides about a Hello. The order is fence, then generation, then serial: whoever shows an old generation holds our signature over it and
// the key of a certificate we issued, so it is challenged whatever became of that certificate since. Otherwise a copy whose original renewed
// would be refused for ever without anybody learning of it. A missing join state is challenged for the same reason as an old one: a paused
// replica may hold the very first Hello, and must not put anybody on hold with it.
//
//	presented                                   | verdict
//	confirmed ≤ p ≤ issued                      | welcome
//	absent, and nothing was ever confirmed      | welcome
//	absent later, unreadable, badly signed      | challenge; answered: join_state_lost, hold
//	signed by a key that this replica lacks     | wait: signing_key_unknown, an incident of ours
//	p > issued, or a later era, validly signed  | welcome, adopt p: control_plane_rollback
//	p < confirmed                               | challenge; answered: cloned_identity_detected, hold both
func Judge(s Standing, h Hello) Verdict {
	if reason := s.refusal(); reason != commonv1.Reason_REASON_UNSPECIFIED {
		return deny(reason)
	}
	if h.Certificate.Unreadable {
		return deny(commonv1.Reason_REASON_RECORD_UNREADABLE)
	}
	p := h.Presented
	if p.Form == FormForeign {
		// Signed for an earlier enrolment: as good as none, for the present one has its own numbers.
		p = Presented{Form: FormAbsent}
	}
	ours := h.InstanceID == s.InstanceID
	ahead := ours && p.Form == FormSigned && (p.Generation > s.Issued || p.Era > s.Era)
	// A certificate that the authority signed and the database does not know, shown with our own signature over that serial or over a number
	// we never gave: it was issued in what the database lost. An orphan of a crashed enrolment has no such signature.
	unknown := h.Certificate.State == commonv1.SerialState_SERIAL_STATE_UNSPECIFIED
	forgotten := unknown && ours && p.Form == FormSigned && (ahead || (p.Serial != "" && p.Serial == h.Serial))
	switch {
	case unknown && !forgotten && ours && p.Form == FormSigned && holdsAnother(s, p):
		return deny(commonv1.Reason_REASON_SERIAL_SUPERSEDED)
	case h.Certificate.State == commonv1.SerialState_SERIAL_STATE_REVOKED, unknown && !forgotten:
		return deny(commonv1.Reason_REASON_SERIAL_UNKNOWN)
	case !ours:
		return deny(commonv1.Reason_REASON_IDENTITY_MISMATCH)
	case p.Form == FormSigned && !ahead && p.Generation < s.Confirmed:
		return Verdict{Ruling: RulingChallenge, Reason: commonv1.Reason_REASON_CLONED_IDENTITY_DETECTED}
	case p.Form == FormUnknownKey:
		// Our replicas differ. Nothing is known of the state, so nothing follows for the node.
		return deny(commonv1.Reason_REASON_SIGNING_KEY_UNKNOWN)
	case p.Form == FormUnreadable, p.Form == FormAbsent && s.Confirmed > 0:
		return Verdict{Ruling: RulingChallenge, Reason: commonv1.Reason_REASON_JOIN_STATE_LOST}
	case h.Certificate.State == commonv1.SerialState_SERIAL_STATE_SUPERSEDED:
		return superseded(s, h)
	case ahead || forgotten:
		v := Verdict{Ruling: RulingWelcome, Reason: commonv1.Reason_REASON_CONTROL_PLANE_ROLLBACK, AdoptSerial: forgotten}
		if ahead {
			v.Adopt = p.Generation
		}
		return v
	default:
		return Verdict{Ruling: RulingWelcome}
	}
}

// superseded refuses a certificate that another one replaced. Issued and never used, or shown together with a join state signed for one
// that counts: the holder has a better certificate and is told to use it. Anything else is somebody we know nothing good of.
func superseded(s Standing, h Hello) Verdict {
	if !h.Certificate.Used || (h.Presented.Form == FormSigned && holdsAnother(s, h.Presented)) {
		return deny(commonv1.Reason_REASON_SERIAL_SUPERSEDED)
	}
	return deny(commonv1.Reason_REASON_SERIAL_UNKNOWN)
}

// holdsAnother says that whoever shows this join state was given it on a certificate that counts, and so holds that too.
func holdsAnother(s Standing, p Presented) bool {
	return p.Serial != "" && (p.Serial == s.CurrentSerial || p.Serial == s.NextSerial)
}

func deny(reason commonv1.Reason) Verdict { return Verdict{Ruling: RulingDeny, Reason: reason} }

// RefusalOf returns why an identity in this state opens nothing; unspecified for an active one.
func RefusalOf(state commonv1.NodeIdentityState) commonv1.Reason {
	switch state {
	case commonv1.NodeIdentityState_NODE_IDENTITY_STATE_ACTIVE:
		return commonv1.Reason_REASON_UNSPECIFIED
	case commonv1.NodeIdentityState_NODE_IDENTITY_STATE_HELD:
		return commonv1.Reason_REASON_IDENTITY_HELD
	case commonv1.NodeIdentityState_NODE_IDENTITY_STATE_QUARANTINED:
		return commonv1.Reason_REASON_IDENTITY_QUARANTINED
	case commonv1.NodeIdentityState_NODE_IDENTITY_STATE_FENCED:
		return commonv1.Reason_REASON_IDENTITY_REVOKED_OR_FENCED
	case commonv1.NodeIdentityState_NODE_IDENTITY_STATE_RETIRED:
		return commonv1.Reason_REASON_IDENTITY_RETIRED
	case commonv1.NodeIdentityState_NODE_IDENTITY_STATE_PENDING:
		return commonv1.Reason_REASON_IDENTITY_UNKNOWN
	case commonv1.NodeIdentityState_NODE_IDENTITY_STATE_UNSPECIFIED:
		return commonv1.Reason_REASON_RECORD_UNREADABLE
	default:
		return commonv1.Reason_REASON_RECORD_UNREADABLE
	}
}

// Ready is one Ready, as far as it decides.
type Ready struct {
	InstanceID  string
	Generation  int64
	Session     string
	Opened      int64 // the generation this session was given; zero: no such session
	Certificate CertificateUse
}

// ReadyVerdict is JudgeReady's answer: admitted, or why not.
type ReadyVerdict struct {
	Admitted bool
	// Again says that this very session is confirmed already: a lost reply was asked for again.
	Again  bool
	Reason commonv1.Reason
}

// JudgeReady decides whether a Ready counts: only for the last generation issued. confirmedSession is the session whose generation is confirmed.
func JudgeReady(s Standing, confirmedSession string, r Ready) ReadyVerdict {
	if reason := s.refusal(); reason != commonv1.Reason_REASON_UNSPECIFIED {
		return ReadyVerdict{Reason: reason}
	}
	switch {
	case r.InstanceID != s.InstanceID:
		return ReadyVerdict{Reason: commonv1.Reason_REASON_IDENTITY_MISMATCH}
	case r.Opened == 0 || r.Opened != r.Generation:
		return ReadyVerdict{Reason: commonv1.Reason_REASON_SESSION_UNKNOWN}
	case r.Generation == s.Confirmed && r.Session == confirmedSession:
		return ReadyVerdict{Admitted: true, Again: true}
	case r.Generation != s.Issued:
		return ReadyVerdict{Reason: commonv1.Reason_REASON_SESSION_SUPERSEDED}
	}
	if r.Certificate.Unreadable {
		return ReadyVerdict{Reason: commonv1.Reason_REASON_RECORD_UNREADABLE}
	}
	switch r.Certificate.State {
	case commonv1.SerialState_SERIAL_STATE_CURRENT, commonv1.SerialState_SERIAL_STATE_NEXT:
		return ReadyVerdict{Admitted: true}
	case commonv1.SerialState_SERIAL_STATE_SUPERSEDED:
		if !r.Certificate.Used {
			return ReadyVerdict{Reason: commonv1.Reason_REASON_SERIAL_SUPERSEDED}
		}
		return ReadyVerdict{Reason: commonv1.Reason_REASON_SERIAL_UNKNOWN}
	case commonv1.SerialState_SERIAL_STATE_UNSPECIFIED, commonv1.SerialState_SERIAL_STATE_REVOKED:
		return ReadyVerdict{Reason: commonv1.Reason_REASON_SERIAL_UNKNOWN}
	default:
		return ReadyVerdict{Reason: commonv1.Reason_REASON_SERIAL_UNKNOWN}
	}
}

// JudgeChallenge decides what a finished challenge proves, given what it was put for. fenceThen is the fence epoch at the challenge: a decision
// of a person since then answers the question, and an old challenge must not reopen it.
func JudgeChallenge(s Standing, fenceThen, fenceNow int64, putFor commonv1.Reason, answered bool) commonv1.Reason {
	if reason := s.refusal(); reason != commonv1.Reason_REASON_UNSPECIFIED {
		return reason
	}
	if !answered || fenceThen != fenceNow {
		return commonv1.Reason_REASON_SESSION_SUPERSEDED
	}
	return putFor
}
