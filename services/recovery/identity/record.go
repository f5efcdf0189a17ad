package identity

import (
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/services/recovery/identity/judge"
)

// Record is one node's row. Its row lock is held while it is changed.
type Record struct {
	NodeID string `db:"node_id" expr:"@.node_id::text"`
	Name   string `db:"name"`
	// InstanceID is the node's: each enrolment makes a new one.
	InstanceID        string                     `db:"node_instance_id" expr:"COALESCE(@.node_instance_id::text, '')"`
	State             commonv1.NodeIdentityState `db:"-"`
	StateReason       string                     `db:"state_reason"`
	StateBy           string                     `db:"state_by"`
	StateAt           time.Time                  `db:"state_at"`
	Alarm             string                     `db:"alarm"`
	FenceEpoch        int64                      `db:"fence_epoch"`
	FenceAcked        int64                      `db:"fence_acked"`
	Notice            int64                      `db:"told"`       // number of the last notice for lifecycle
	NoticeAcked       int64                      `db:"told_acked"` // number of the last one that it acknowledged
	Issued            int64                      `db:"issued"`
	Confirmed         int64                      `db:"confirmed"`
	ConfirmedSession  string                     `db:"confirmed_session_id" expr:"COALESCE(@.confirmed_session_id::text, '')"`
	ReplacedNonce     string                     `db:"replaced_nonce"`
	CurrentSerial     string                     `db:"current_serial"`
	NextSerial        string                     `db:"next_serial"`
	CertificateEnds   time.Time                  `db:"-"` // zero without a certificate
	IssuerFingerprint string                     `db:"issuer_fingerprint"`
	// WorkspaceID and the three fields below are set if the node is a launched instance.
	WorkspaceID        string          `db:"workspace_id" expr:"COALESCE(@.workspace_id::text, '')"`
	TenantID           string          `db:"tenant_id" expr:"COALESCE(@.tenant_id::text, '')"`
	Epoch              int64           `db:"epoch"`
	LaunchedInstanceID string          `db:"instance_id" expr:"COALESCE(@.instance_id::text, '')"`
	Profile            string          `db:"profile"` // by name; empty: the default
	Mints              int32           `db:"mints"`
	RefusedRegisters   int32           `db:"refused_registers"`
	LastRefusal        commonv1.Reason `db:"-"`
	AuthoritySeq       int64           `db:"authority_seq"`
	JoinKeys           []string        `db:"join_keys"`
	Version            int64           `db:"version"`
	CreatedAt          time.Time       `db:"created_at"`

	correlationForNext string          `db:"-"`
	correlated         string          `db:"-"` // the correlation id of the recovery action that the change belongs to
	ended              commonv1.Reason `db:"-"` // the reason with which a retired instance is refused; see MarkEnded
	unreadState        string          `db:"-"` // as it is stored, where this build does not know it
	unreadRefusal      string          `db:"-"`
	plain              bool            `db:"-"` // it has another session than before, and nothing else has changed
	decided            string          `db:"-"` // the audit action of a change of state that is not written yet
}

// Standing returns the fields of a record that package judge needs.
func (r *Record) Standing(era int64) judge.Standing {
	return judge.Standing{
		State: r.State, InstanceID: r.InstanceID, Issued: r.Issued, Confirmed: r.Confirmed, Era: era,
		CurrentSerial: r.CurrentSerial, NextSerial: r.NextSerial, Ended: r.ended,
	}
}

// Fencing reports whether lifecycle has yet to acknowledge the present fence.
func (r *Record) Fencing() bool { return r.FenceAcked < r.FenceEpoch }

// Readable reports whether this build knows the state of the node. It makes no decision about a node whose state it
// does not know.
func (r *Record) Readable() bool { return r.unreadState == "" }

// Proto returns the node as events and responses carry it.
func (r *Record) Proto() *recoveryv1.NodeIdentity {
	out := &recoveryv1.NodeIdentity{
		NodeId: r.NodeID, Name: r.Name, NodeInstanceId: r.InstanceID, State: r.State, StateReason: r.StateReason,
		StateBy: r.StateBy, StateAt: timestamppb.New(r.StateAt), FenceEpoch: r.FenceEpoch, Fencing: r.Fencing(),
		CurrentSerial: r.CurrentSerial, NextSerial: r.NextSerial, IssuerFingerprint: r.IssuerFingerprint, Issued: r.Issued,
		Confirmed: r.Confirmed, WorkspaceId: r.WorkspaceID, TenantId: r.TenantID, Epoch: r.Epoch,
		InstanceId: r.LaunchedInstanceID, Mints: r.Mints, RefusedRegisters: r.RefusedRegisters, LastRefusal: r.LastRefusal,
		CreatedAt: timestamppb.New(r.CreatedAt),
		Version:   r.Version,
		Alarm:     r.Alarm,
		Profile:   r.Profile,
	}
	if !r.CertificateEnds.IsZero() {
		out.CertificateNotAfter = timestamppb.New(r.CertificateEnds)
	}
	return out
}

// Authority returns the node as nodeapi's view has it.
func (r *Record) Authority() *recoveryv1.NodeAuthority {
	return &recoveryv1.NodeAuthority{
		NodeId: r.NodeID, NodeInstanceId: r.InstanceID, State: r.State, FenceEpoch: r.FenceEpoch,
		CurrentSerial: r.CurrentSerial, NextSerial: r.NextSerial, Issued: r.Issued, Confirmed: r.Confirmed,
		ConfirmedSessionId: r.ConfirmedSession, Sequence: r.AuthoritySeq, ReplacedNonce: r.ReplacedNonce,
		Launched: r.LaunchedInstanceID != "", Profile: r.Profile,
	}
}

func (r *Record) event() events.Event {
	return events.Event{
		Kind: "node_identity.changed", AggregateType: "node_identity", AggregateID: r.NodeID, AggregateVersion: r.Version,
		Payload: r.Proto(),
		Correlation: events.Correlation{
			CorrelationID: r.correlationForNext, TenantID: r.TenantID, WorkspaceID: r.WorkspaceID, NodeID: r.NodeID,
			NodeInstanceID: r.InstanceID,
		},
	}
}

// announced reports whether a change of the record is an event. That a node which was admitted before has another
// session on the same certificate is none: nodeapi reports the session, and no consumer needs its numbers from here.
func (r *Record) announced() bool { return !r.plain || r.correlated != "" || r.decided != "" }

// Enter moves the record into a state and draws the fence that lifecycle must apply. by is a person's subject or this
// service.
func (r *Record) Enter(state commonv1.NodeIdentityState, by, reason string, at time.Time, era int64) {
	r.State, r.StateBy, r.StateReason, r.StateAt = state, by, reason, at
	r.FenceEpoch = int64(ids.NextWithEra(ids.Fence(r.FenceEpoch), era))
	r.Notice++
	r.decided = decision(state)
	if state != commonv1.NodeIdentityState_NODE_IDENTITY_STATE_ACTIVE {
		// An agent that comes back must open a new session: no session from before the change counts.
		r.ConfirmedSession, r.ReplacedNonce = "", ""
	}
}

// Hold puts an active node on hold for an alarm. A node in any other state keeps that state: it may open no session as
// it is.
func (r *Record) Hold(alarm, reason string, at time.Time, era int64) {
	if r.State != commonv1.NodeIdentityState_NODE_IDENTITY_STATE_ACTIVE {
		return
	}
	r.Alarm = alarm
	r.Enter(commonv1.NodeIdentityState_NODE_IDENTITY_STATE_HELD, "recovery", reason, at, era)
}

// reactivate lifts a hold, a quarantine or a fence. If the node has an alarm, the confirmed generation is forgotten, so
// that a host that has lost its join state can open a session again.
func (r *Record) reactivate(by, reason string, at time.Time, era int64) {
	r.Enter(commonv1.NodeIdentityState_NODE_IDENTITY_STATE_ACTIVE, by, reason, at, era)
	if r.Alarm != AlarmNone {
		r.Confirmed = 0
	}
	r.Alarm = AlarmNone
}
