package judge

import (
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
)

// Form is the kind of join state that a Hello carried.
type Form int

// The forms. Foreign is validly signed for another instance of the same node, which an agent that enrolled anew may
// still have. UnknownKey names a signing key that this replica does not have.
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
	Serial     string // the certificate for which it was signed
	KeyID      string // of FormUnknownKey
}

// CertificateUse is the record that recovery has of the certificate a connection was opened with.
type CertificateUse struct {
	State commonv1.SerialState // unspecified: the certificate was not issued to this instance
	Used  bool                 // a session has been ready on it
	// Unreadable is set if the certificate was issued to this instance and this build does not know its state.
	Unreadable bool
}

// Hello is one attempt to open a session, with the fields that the decision depends on.
type Hello struct {
	InstanceID  string
	Serial      string // of the connection's certificate
	Presented   Presented
	Certificate CertificateUse
}

// Standing is the state of a node instance, read under the lock on its row.
type Standing struct {
	State         commonv1.NodeIdentityState
	InstanceID    string
	Issued        int64 // last generation issued
	Confirmed     int64 // the generation whose session is offered work
	Era           int64 // of the database
	CurrentSerial string
	NextSerial    string
	// Ended is the reason with which a retired instance is refused in place of identity_retired; unspecified for a
	// machine.
	Ended commonv1.Reason
}

// Ruling is the decision about a Hello.
type Ruling int

// The rulings. Welcome issues the next generation. Challenge asks for a signature first. Deny closes.
const (
	RulingDeny Ruling = iota
	RulingWelcome
	RulingChallenge
)

// Verdict is the result of Open.
type Verdict struct {
	Ruling Ruling
	// Reason is the reason of a denial; for a challenge, the finding that a signed answer proves: cloned_identity_detected
	// or join_state_lost; for a welcome, control_plane_rollback if the database went back in time, else unspecified.
	Reason commonv1.Reason
	// Adopt is the generation to take over before issuing, because the node has a later one than the database. Zero: none.
	Adopt int64
	// AdoptSerial is set if the connection's certificate, which has no row or is superseded, becomes the next one.
	AdoptSerial bool
}

// Open decides about a Hello. The rules are in the order of the table; the first one that applies decides. p is the
// generation of a join state with recovery's signature. A join state of an earlier enrolment counts as absent.
//
//	presented                                              | verdict
//	anything, by an identity that is not active            | deny: the reason of its state
//	a certificate in a state that this build does not know | deny: record_unreadable
//	a certificate without a row, which is not adopted:     |
//	  the id of another instance of the node               | deny: serial_unknown
//	  p was given on another certificate that counts       | deny: serial_superseded
//	  a join state that this replica cannot verify         | deny: signing_key_unknown
//	  anything else                                        | deny: serial_unknown
//	a revoked certificate                                  | deny: serial_unknown
//	the id of another instance of the node                 | deny: identity_mismatch
//	p < confirmed, and of no later era                     | challenge; answered: cloned_identity_detected, hold
//	a join state that this replica cannot verify           | deny: signing_key_unknown
//	an unreadable or badly signed join state               | challenge; answered: join_state_lost, hold
//	no join state, and a generation was confirmed          | challenge; answered: join_state_lost, hold
//	a superseded certificate, which is not adopted         | deny: serial_superseded or serial_unknown
//	p > issued, or of a later era                          | welcome, adopt p: control_plane_rollback
//	an adopted certificate without a row                   | welcome: control_plane_rollback
//	confirmed ≤ p ≤ issued                                 | welcome
//	no join state, and nothing was ever confirmed          | welcome
//
// A certificate is adopted if p is later than what the database has, or was given on that very certificate, and the
// certificate has no row, because it was issued in a history that the database has lost, or was superseded before a
// session was ready on it.
//
// The rule of old generations comes before that of superseded certificates: otherwise a copy whose original has renewed
// would be refused for ever and never be detected. A missing join state is challenged before the node is put on hold
// for it, because a paused replica may deliver the very first Hello late.
//
// A denial with signing_key_unknown makes the node wait and is an incident of the control plane. It is no evidence
// against the node.
func Open(s Standing, h Hello) Verdict {
	if reason := s.Refusal(); reason != commonv1.Reason_REASON_UNSPECIFIED {
		return deny(reason)
	}
	if h.Certificate.Unreadable {
		return deny(commonv1.Reason_REASON_RECORD_UNREADABLE)
	}
	p := h.Presented
	if p.Form == FormForeign {
		// A state that was signed for an earlier enrolment counts as absent, since the present enrolment has its own
		// generations.
		p = Presented{Form: FormAbsent}
	}
	ours := h.InstanceID == s.InstanceID
	ahead := ours && p.Form == FormSigned && (p.Generation > s.Issued || p.Era > s.Era)
	// The certificate is signed by the authority and missing from the database, and comes with recovery's own signature
	// over that serial, or over a generation that the database never gave: it was issued in the history that the database
	// has lost. The orphan of a crashed enrolment has no such signature.
	unknown := h.Certificate.State == commonv1.SerialState_SERIAL_STATE_UNSPECIFIED
	onThis := ours && p.Form == FormSigned && p.Serial != "" && p.Serial == h.Serial
	forgotten := unknown && (ahead || onThis)
	// A renewal has replaced the certificate before a session was ready on it here. One was opened on it, so that the
	// agent may have no other: after a restore, sessions of the lost history may have been ready on it, and the renewal
	// may be one that a paused replica executes late.
	replaced := h.Certificate.State == commonv1.SerialState_SERIAL_STATE_SUPERSEDED && !h.Certificate.Used &&
		(ahead || onThis)
	switch {
	case unknown && !forgotten && ours && p.Form == FormSigned && signedForAnother(s, p):
		return deny(commonv1.Reason_REASON_SERIAL_SUPERSEDED)
	case unknown && ours && p.Form == FormUnknownKey:
		// Whether the certificate is of a lost history shows by the join state, which another replica can verify.
		return deny(commonv1.Reason_REASON_SIGNING_KEY_UNKNOWN)
	case h.Certificate.State == commonv1.SerialState_SERIAL_STATE_REVOKED, unknown && !forgotten:
		return deny(commonv1.Reason_REASON_SERIAL_UNKNOWN)
	case !ours:
		return deny(commonv1.Reason_REASON_IDENTITY_MISMATCH)
	case p.Form == FormSigned && !ahead && p.Generation < s.Confirmed:
		return Verdict{Ruling: RulingChallenge, Reason: commonv1.Reason_REASON_CLONED_IDENTITY_DETECTED}
	case p.Form == FormUnknownKey:
		// The replicas of recovery have different keys. The join state cannot be verified, so it is no evidence against the
		// node.
		return deny(commonv1.Reason_REASON_SIGNING_KEY_UNKNOWN)
	case p.Form == FormUnreadable, p.Form == FormAbsent && s.Confirmed > 0:
		return Verdict{Ruling: RulingChallenge, Reason: commonv1.Reason_REASON_JOIN_STATE_LOST}
	case h.Certificate.State == commonv1.SerialState_SERIAL_STATE_SUPERSEDED && !replaced:
		return superseded(s, h)
	case ahead || forgotten || replaced:
		v := Verdict{Ruling: RulingWelcome, AdoptSerial: forgotten || replaced}
		if ahead || forgotten {
			v.Reason = commonv1.Reason_REASON_CONTROL_PLANE_ROLLBACK
		}
		if ahead {
			v.Adopt = p.Generation
		}
		return v
	default:
		return Verdict{Ruling: RulingWelcome}
	}
}

// superseded refuses a certificate that another one replaced. If it was issued and never used, or comes with a join
// state that was signed for a certificate which counts, the agent has a better certificate and is told to use it.
// Otherwise nothing shows that the client has one.
func superseded(s Standing, h Hello) Verdict {
	if !h.Certificate.Used || (h.Presented.Form == FormSigned && signedForAnother(s, h.Presented)) {
		return deny(commonv1.Reason_REASON_SERIAL_SUPERSEDED)
	}
	return deny(commonv1.Reason_REASON_SERIAL_UNKNOWN)
}

// signedForAnother reports whether the join state was given out on a certificate that counts, so that the agent which
// presents it must have that certificate too.
func signedForAnother(s Standing, p Presented) bool {
	return p.Serial != "" && (p.Serial == s.CurrentSerial || p.Serial == s.NextSerial)
}

func deny(reason commonv1.Reason) Verdict { return Verdict{Ruling: RulingDeny, Reason: reason} }

// RefusalOf returns the reason why an identity in this state may open no session; unspecified for an active one.
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

// Refusal returns the reason why the identity may open no session; unspecified for an active one.
func (s Standing) Refusal() commonv1.Reason {
	reason := RefusalOf(s.State)
	if reason == commonv1.Reason_REASON_IDENTITY_RETIRED && s.Ended != commonv1.Reason_REASON_UNSPECIFIED {
		return s.Ended
	}
	return reason
}

// Ready is one Ready, with the fields that the decision depends on.
type Ready struct {
	InstanceID  string
	Generation  int64
	Session     string
	Opened      int64 // the generation this session was given; zero: no such session
	Certificate CertificateUse
}

// ReadyVerdict is the result of Confirm: admitted, or the reason why not.
type ReadyVerdict struct {
	Admitted bool
	// Again is set if this very session is confirmed already: the reply was lost and the request was repeated.
	Again  bool
	Reason commonv1.Reason
}

// Confirm decides whether a Ready counts: only for the last generation issued. confirmedSession is the session whose
// generation is confirmed.
func Confirm(s Standing, confirmedSession string, r Ready) ReadyVerdict {
	if reason := s.Refusal(); reason != commonv1.Reason_REASON_UNSPECIFIED {
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

// Challenge returns the reason that a finished challenge proves, given the reason it was sent for. fenceThen is
// the fence epoch at the challenge: if a person has decided about the node since then, an old challenge must not
// overrule that decision.
func Challenge(s Standing, fenceThen, fenceNow int64, putFor commonv1.Reason, answered bool) commonv1.Reason {
	if reason := s.Refusal(); reason != commonv1.Reason_REASON_UNSPECIFIED {
		return reason
	}
	if !answered || fenceThen != fenceNow {
		return commonv1.Reason_REASON_SESSION_SUPERSEDED
	}
	return putFor
}
