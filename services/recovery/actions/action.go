package actions

import (
	"errors"
	"slices"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/names"
)

// Kind is what is done.
type Kind = recoveryv1.RecoveryActionKind

// The kinds of actions.
const (
	ReEnrolment    = recoveryv1.RecoveryActionKind_RECOVERY_ACTION_KIND_RE_ENROLMENT
	Bundle         = recoveryv1.RecoveryActionKind_RECOVERY_ACTION_KIND_BUNDLE
	CARepair       = recoveryv1.RecoveryActionKind_RECOVERY_ACTION_KIND_CA_REPAIR
	Rebootstrap    = recoveryv1.RecoveryActionKind_RECOVERY_ACTION_KIND_REBOOTSTRAP
	Fencing        = recoveryv1.RecoveryActionKind_RECOVERY_ACTION_KIND_CLONED_IDENTITY_FENCING
	StaleTaskSweep = recoveryv1.RecoveryActionKind_RECOVERY_ACTION_KIND_STALE_TASK_SWEEP
)

// State is whether an action goes on, or how it ended.
type State = recoveryv1.RecoveryActionState

// The states of actions.
const (
	StateOpen       = recoveryv1.RecoveryActionState_RECOVERY_ACTION_STATE_OPEN
	StateSucceeded  = recoveryv1.RecoveryActionState_RECOVERY_ACTION_STATE_SUCCEEDED
	StateFailed     = recoveryv1.RecoveryActionState_RECOVERY_ACTION_STATE_FAILED
	StateSuperseded = recoveryv1.RecoveryActionState_RECOVERY_ACTION_STATE_SUPERSEDED
)

// Automatic is the requester of what a node does by itself.
const Automatic = "auto_recovery"

const (
	// ControlPlane is the id under which actions of the control plane are stored.
	ControlPlane = "00000000-0000-0000-0000-000000000000"
	// mostOutcome bounds what is stored of an outcome, in characters.
	mostOutcome = 512
)

// row is a row of recovery.recovery_action.
type row struct {
	ID                 string     `db:"action_id" expr:"@.action_id::text"`
	NodeID             string     `db:"node_id" expr:"@.node_id::text"`
	Kind               string     `db:"kind"`
	State              string     `db:"state"`
	Reason             string     `db:"reason"`
	Requester          string     `db:"requester"`
	CorrelationID      string     `db:"correlation_id"`
	AgentCorrelationID string     `db:"agent_correlation_id"`
	FirstRejectedAt    *time.Time `db:"first_rejected_at"`
	BegunAt            time.Time  `db:"begun_at"`
	EffectAt           *time.Time `db:"effect_at"`
	SessionAt          *time.Time `db:"session_at"` // the first session on the certificate that it brought
	HealthyAt          *time.Time `db:"healthy_at"`
	EndedAt            *time.Time `db:"ended_at"`
	FailsAt            time.Time  `db:"fails_at"`
	Attempts           int32      `db:"attempts"`
	Outcome            string     `db:"outcome"`
	Version            int64      `db:"version"`
}

// message returns the row as events and responses carry it. The error is about the first value that this build does not
// know, which the message has as it is stored.
func (r *row) message() (*recoveryv1.RecoveryAction, error) {
	kind, errKind := names.Parse[Kind](r.Kind)
	state, errState := names.Parse[State](r.State)
	reason, errReason := names.Parse[commonv1.DriftReason](r.Reason)
	out := &recoveryv1.RecoveryAction{
		ActionId: r.ID, NodeId: r.NodeID, Kind: kind, State: state, Reason: reason, Requester: r.Requester,
		CorrelationId: r.CorrelationID, AgentCorrelationId: r.AgentCorrelationID,
		FirstRejectedAt: stamp(r.FirstRejectedAt), BegunAt: timestamppb.New(r.BegunAt), EffectAt: stamp(r.EffectAt),
		HealthyAt: stamp(r.HealthyAt), EndedAt: stamp(r.EndedAt), FailsAt: timestamppb.New(r.FailsAt),
		Attempts: r.Attempts, Outcome: r.Outcome, Version: r.Version,
	}
	if r.NodeID == ControlPlane {
		out.NodeId = ""
	}
	switch {
	case errKind != nil:
		out.Unknown = r.Kind
	case errState != nil:
		out.Unknown = r.State
	case errReason != nil:
		out.Unknown = r.Reason
	}
	for _, err := range []error{errKind, errState, errReason} {
		if err != nil {
			return out, err
		}
	}
	return out, nil
}

func (r *row) event() (events.Event, error) {
	body, err := r.message()
	var unknown *names.UnknownError
	if err != nil && !errors.As(err, &unknown) {
		return events.Event{}, err
	}
	return events.Event{
		Kind: "recovery_action.changed", AggregateType: "recovery_action", AggregateID: r.ID, AggregateVersion: r.Version,
		Payload:     body,
		Correlation: events.Correlation{CorrelationID: r.CorrelationID, NodeID: body.GetNodeId()},
	}, nil
}

func stamp(t *time.Time) *timestamppb.Timestamp {
	if t == nil {
		return nil
	}
	return timestamppb.New(*t)
}

// Action is an action that a transaction has locked, or begins. Its methods change it in memory; Save of its Book
// writes it.
type Action struct {
	row
	kind    Kind
	reason  commonv1.DriftReason
	added   bool
	changed bool
	within  time.Duration // of one that is added: until it fails; zero: by its kind's budget
	longer  bool          // the budget of its kind begins anew
}

// Kind returns what is done.
func (a *Action) Kind() Kind { return a.kind }

// Reason returns the reason for which it is done; unspecified: none was concluded.
func (a *Action) Reason() commonv1.DriftReason { return a.reason }

// Correlation returns the id of all that follows from the first rejection.
func (a *Action) Correlation() string { return a.CorrelationID }

// Open reports whether the action goes on.
func (a *Action) Open() bool { return a.EndedAt == nil }

// Effective reports whether what is done has had its effect: the certificate was issued, the copies were closed.
func (a *Action) Effective() bool { return a.EffectAt != nil }

// Used reports whether a session was ready on the certificate that the action brought.
func (a *Action) Used() bool { return a.SessionAt != nil }

// enrols reports whether the effect of a kind is a certificate.
func enrols(k Kind) bool { return slices.Contains(certified, k) }

// certified are the kinds whose effect is a certificate.
var certified = []Kind{ReEnrolment, Bundle, Rebootstrap}

// Attempt notes an attempt and what came of it, in words.
func (a *Action) Attempt(outcome string) {
	a.Attempts++
	a.Outcome, a.changed = shorten(outcome), true
}

// TakeEffect notes that an attempt had the effect of the action. An effect before stays the first one, but for a
// certificate: the last one that was issued counts. A bundle waits for its use until its token ends: from then on it
// has the budget of its kind.
func (a *Action) TakeEffect(at time.Time, outcome string) {
	a.Attempt(outcome)
	a.longer = a.longer || a.kind == Bundle && a.EffectAt == nil && !a.added
	if a.EffectAt == nil || enrols(a.kind) {
		a.EffectAt, a.SessionAt = &at, nil
	}
}

// Rejected notes when the first rejection was, if none is known.
func (a *Action) Rejected(at time.Time) {
	if a.FirstRejectedAt == nil && !at.IsZero() && !at.After(a.BegunAt) {
		a.FirstRejectedAt, a.changed = &at, true
	}
}

// Succeed ends the action at the healthy verdict, or as its reason has ended.
func (a *Action) Succeed(at time.Time, outcome string) {
	a.HealthyAt = &at
	a.end(StateSucceeded, at, outcome)
}

// Supersede ends the action, in whose place a person's decision or another action has come.
func (a *Action) Supersede(at time.Time, outcome string) { a.end(StateSuperseded, at, outcome) }

func (a *Action) end(state State, at time.Time, outcome string) {
	if !a.Open() {
		return
	}
	a.State, a.EndedAt, a.changed = names.Of(state), &at, true
	if outcome != "" {
		a.Outcome = shorten(outcome)
	}
}

// shorten cuts a text to what is stored of it.
func shorten(text string) string {
	if runes := []rune(text); len(runes) > mostOutcome {
		return string(runes[:mostOutcome])
	}
	return text
}
