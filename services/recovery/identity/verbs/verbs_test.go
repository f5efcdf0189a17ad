package verbs_test

import (
	"strings"
	"testing"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/recovery/identity/verbs"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// TestEveryStateHasAWayOut walks the enum: any state but the last has a verb that leaves it, and each verb's refusals
// are typed.
func TestEveryStateHasAWayOut(t *testing.T) {
	for _, state := range names.All[commonv1.NodeIdentityState]() {
		exits := 0
		for _, verb := range names.All[recoveryv1.IdentityVerb]() {
			to, err := verbs.Transition(state, "", verb, []string{verbs.RoleSecurity})
			if err == nil {
				exits++
				if to == state {
					t.Errorf("%s from %s leads nowhere", names.Of(verb), names.Of(state))
				}
				continue
			}
			refusal, ok := fault.As(err)
			if !ok {
				t.Errorf("%s from %s: %v is not a typed refusal", names.Of(verb), names.Of(state), err)
				continue
			}
			if common := fault.RowOf(refusal.Reason).Remedy; refusal.Remedy == common &&
				refusal.Reason == commonv1.Reason_REASON_PRECONDITION_FAILED {
				t.Errorf("%s from %s: the refusal has no next action of its own", names.Of(verb), names.Of(state))
			}
		}
		final := state == commonv1.NodeIdentityState_NODE_IDENTITY_STATE_RETIRED
		if (exits == 0) != final {
			t.Errorf("%s has %d exits", names.Of(state), exits)
		}
	}
}

// TestWhatNeedsTheSecurityRole: each decision by which a node that may be in other hands is locked out or let in again.
// The refusal of an operator names the role and the next action.
func TestWhatNeedsTheSecurityRole(t *testing.T) {
	const (
		active      = commonv1.NodeIdentityState_NODE_IDENTITY_STATE_ACTIVE
		held        = commonv1.NodeIdentityState_NODE_IDENTITY_STATE_HELD
		quarantined = commonv1.NodeIdentityState_NODE_IDENTITY_STATE_QUARANTINED
		fenced      = commonv1.NodeIdentityState_NODE_IDENTITY_STATE_FENCED
		retire      = recoveryv1.IdentityVerb_IDENTITY_VERB_RETIRE
		fence       = recoveryv1.IdentityVerb_IDENTITY_VERB_FENCE
		clone       = "cloned_identity_detected"
		reuse       = "token_reuse"
		reactivate  = recoveryv1.IdentityVerb_IDENTITY_VERB_REACTIVATE
	)
	for name, test := range map[string]struct {
		from   commonv1.NodeIdentityState
		copied string
		verb   recoveryv1.IdentityVerb
		next   string // a part of the next action of the refusal; empty: an operator may
	}{
		"hold":                            {active, "", recoveryv1.IdentityVerb_IDENTITY_VERB_HOLD, ""},
		"quarantine":                      {held, "", recoveryv1.IdentityVerb_IDENTITY_VERB_QUARANTINE, ""},
		"fence an active node":            {active, "", fence, "gpuaas nodes quarantine"},
		"fence a held node":               {held, clone, fence, "security role"},
		"fence a quarantined node":        {quarantined, "", fence, "security role"},
		"reactivate":                      {held, "", reactivate, ""},
		"reactivate a quarantined node":   {quarantined, "", reactivate, ""},
		"reactivate a fenced node":        {fenced, "", reactivate, "security role"},
		"reactivate a copied node":        {held, clone, reactivate, "gpuaas nodes bundle"},
		"reactivate after a reused token": {held, reuse, reactivate, "gpuaas nodes bundle"},
		"reactivate a copied node that was quarantined": {
			quarantined, clone, reactivate, "gpuaas nodes bundle",
		},
		"reactivate a copied node that was fenced": {fenced, clone, reactivate, "gpuaas nodes bundle"},
		"retire a copied node":                     {held, clone, retire, ""},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := verbs.Transition(test.from, test.copied, test.verb, []string{verbs.RoleSecurity}); err != nil {
				t.Errorf("security: %v", err)
			}
			_, err := verbs.Transition(test.from, test.copied, test.verb, []string{"operator", "viewer"})
			if test.next == "" {
				if err != nil {
					t.Errorf("an operator: %v", err)
				}
				return
			}
			refusal, ok := fault.As(err)
			if ok && test.verb == reactivate && !strings.Contains(refusal.Public, test.copied) {
				t.Errorf("it does not name the alarm: %v", refusal)
			}
			if !ok || refusal.Reason != commonv1.Reason_REASON_PERMISSION_DENIED ||
				!strings.Contains(refusal.Remedy, test.next) || len(refusal.Unmet) != 1 ||
				!strings.Contains(refusal.Unmet[0], "role security; you have operator, viewer") {
				t.Errorf("an operator: %v %+v", err, refusal)
			}
		})
	}
}
