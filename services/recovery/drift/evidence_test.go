package drift_test

import (
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/services/recovery/drift"
)

// TestEveryStateOfAnIdentityIsEvidence checks the verdict on a connected and admitted node for each state of its
// identity, with each alarm.
func TestEveryStateOfAnIdentityIsEvidence(t *testing.T) {
	const (
		pending     = commonv1.NodeIdentityState_NODE_IDENTITY_STATE_PENDING
		activeState = commonv1.NodeIdentityState_NODE_IDENTITY_STATE_ACTIVE
		heldState   = commonv1.NodeIdentityState_NODE_IDENTITY_STATE_HELD
		quarantined = commonv1.NodeIdentityState_NODE_IDENTITY_STATE_QUARANTINED
		fenced      = commonv1.NodeIdentityState_NODE_IDENTITY_STATE_FENCED
		retired     = commonv1.NodeIdentityState_NODE_IDENTITY_STATE_RETIRED
	)
	for name, c := range map[string]struct {
		state commonv1.NodeIdentityState
		alarm string
		want  commonv1.DriftReason
		next  string
	}{
		"none":    {want: unspecified, next: "enrol the machine with its bundle"},
		"pending": {state: pending, want: unspecified, next: "enrol the machine with its bundle"},
		"active":  {state: activeState, want: unspecified},
		"held": {
			state: heldState, want: held,
			next: "look at the reason of the hold, then reactivate, quarantine or fence",
		},
		"quarantined": {
			state: quarantined, want: revoked,
			next: "reactivate the node; to enrol it again, issue a bundle then (`gpuaas nodes bundle NODE`)",
		},
		"fenced": {
			state: fenced, want: revoked,
			next: "reactivate with the security role; to enrol it again, issue a bundle then " +
				"(`gpuaas nodes bundle NODE`)",
		},
		"retired": {
			state: retired, want: revoked,
			next: "none: this identity is final; enrol the machine anew if it is to return",
		},
		"held, join state lost": {
			state: heldState, alarm: "join_state_lost", want: joinStateLost,
			next: "let the node recover, or issue a bundle (`gpuaas nodes bundle NODE`)",
		},
		"held, copied": {
			state: heldState, alarm: "cloned_identity_detected", want: cloned,
			next: "fence the node, find the second copy, and give the machine a new identity",
		},
		"fenced, copied": {
			state: fenced, alarm: "cloned_identity_detected", want: cloned,
			next: "fence the node, find the second copy, and give the machine a new identity",
		},
		"held, token reused": {
			state: heldState, alarm: "token_reuse", want: tokenReuse,
			next: "fence the node: its enrolment token was used with two keys",
		},
		"retired, copied": {
			state: retired, alarm: "cloned_identity_detected", want: revoked,
			next: "none: this identity is final; enrol the machine anew if it is to return",
		},
	} {
		t.Run(name, func(t *testing.T) {
			e := drift.OfIdentity(&recoveryv1.NodeIdentity{
				NodeId: node, State: c.state, Alarm: c.alarm, StateAt: timestamppb.New(now), StateReason: "an operator said so",
			})
			if e.NodeID != node || e.Source != identity || e.Part != certificate || !e.ObservedAt.Equal(now) {
				t.Errorf("evidence %+v", e)
			}
			v := drift.Classify([]drift.Evidence{e, isHeard, admitted}, now)
			if v.Reason != c.want || v.NextAction != c.next {
				t.Errorf("%s, next %q; want %s, next %q", names.Of(v.Reason), v.NextAction, names.Of(c.want), c.next)
			}
		})
	}
	created := drift.OfIdentity(&recoveryv1.NodeIdentity{CreatedAt: timestamppb.New(now.Add(-time.Hour))})
	if !created.ObservedAt.Equal(now.Add(-time.Hour)) {
		t.Errorf("an identity that never changed was observed at %s, want its creation", created.ObservedAt)
	}
}

// TestAGateIsEvidence: a closed gate and a full disk are evidence of two parts, so neither replaces the other.
func TestAGateIsEvidence(t *testing.T) {
	full := &commonv1.HostFacts{StateDisk: &commonv1.StateDisk{Full: true, Path: "/data", Detail: "2 MiB free"}}
	for name, c := range map[string]struct {
		gate *lifecyclev1.NodeGate
		want commonv1.DriftReason
		next string
	}{
		"admitted": {gate: &lifecyclev1.NodeGate{Admitted: true}, want: unspecified},
		"closed": {
			gate: &lifecyclev1.NodeGate{}, want: notAdmitted, next: "wait: lifecycle has yet to open its gate",
		},
		"no room": {
			gate: &lifecyclev1.NodeGate{Admitted: true, Host: full}, want: diskFull,
			next: "free room on its disk, in /data: 2 MiB free",
		},
		"closed, no room": {
			gate: &lifecyclev1.NodeGate{Host: full}, want: diskFull,
			next: "free room on its disk, in /data: 2 MiB free",
		},
	} {
		t.Run(name, func(t *testing.T) {
			c.gate.NodeId = node
			of := drift.OfGate(c.gate, now)
			if of[0].Part == of[1].Part || of[0].Source != gate || of[1].Source != gate || of[0].NodeID != node {
				t.Errorf("evidence %+v", of)
			}
			v := drift.Classify(append(of[:], active, isHeard), now)
			if v.Reason != c.want || v.NextAction != c.next {
				t.Errorf("%s, next %q; want %s, next %q", names.Of(v.Reason), v.NextAction, names.Of(c.want), c.next)
			}
		})
	}
}
