package policy_test

import (
	"strings"
	"testing"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/policy"
)

// TestATermIsNotShorterThanWhatRestsOnIt: a lease, a window of counting and the promise of a key are refused with an
// error that names an accepted value, from both sides.
func TestATermIsNotShorterThanWhatRestsOnIt(t *testing.T) {
	for _, c := range []struct{ key, value, over, accepted string }{
		{policy.RetentionRunsSeconds, "59", "60 seconds: a lease", "60"},
		{policy.RetentionEventsSeconds, "299", policy.AuditDedupeWindowSeconds, "300"},
		{policy.RetentionOperationKeysSeconds, "86400", policy.OperationKeyPromiseSeconds, "2592000"},
		{policy.OperationKeyPromiseSeconds, "2592001", policy.RetentionOperationKeysSeconds, "2592000"},
		{policy.RetentionCredentialsSeconds, "3599", policy.StreamMaxAgeSeconds, "3600"},
		{policy.RetentionTasksSeconds, "60", "", "60"},
	} {
		err := policy.Defaults().Validate(c.key, c.value, policy.Ack{})
		if c.over == "" {
			if err != nil {
				t.Errorf("%s=%s: %v", c.key, c.value, err)
			}
			continue
		}
		if !fault.Has(err, commonv1.Reason_REASON_POLICY_VALUE_REFUSED) || !strings.Contains(err.Error(), c.over) ||
			!strings.Contains(fault.From(err).Remedy, "choose ") {
			t.Errorf("%s=%s: %v", c.key, c.value, err)
		}
		if err := policy.Defaults().Validate(c.key, c.accepted, policy.Ack{}); err != nil {
			t.Errorf("%s=%s is refused: %v", c.key, c.accepted, err)
		}
	}
}

// TestTheMeaningOfABoundSaysSo: the promise of a key acts through the term that it bounds, and its meaning names it.
func TestTheMeaningOfABoundSaysSo(t *testing.T) {
	key, ok := policy.Lookup(policy.OperationKeyPromiseSeconds)
	if !ok || !strings.HasPrefix(key.Meaning, "the least value of "+policy.RetentionOperationKeysSeconds) {
		t.Errorf("%s means: %q", policy.OperationKeyPromiseSeconds, key.Meaning)
	}
}

// TestAStoredTermThatIsTooShortCountsAsAbsent checks that a stored term which is too short counts as absent, and so
// does a promise that outlasts the keys.
func TestAStoredTermThatIsTooShortCountsAsAbsent(t *testing.T) {
	set, err := policy.NewSet(map[string]string{
		policy.RetentionRunsSeconds: "5", policy.OperationKeyPromiseSeconds: "99999999", policy.RetentionTasksSeconds: "600",
	})
	if err == nil || set.Overridden(policy.RetentionRunsSeconds) || set.Overridden(policy.OperationKeyPromiseSeconds) {
		t.Errorf("%v, %v", set.Given(), err)
	}
	if !set.Overridden(policy.RetentionTasksSeconds) {
		t.Error("a term that is long enough was left out")
	}
}
