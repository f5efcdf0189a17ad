package policy

import (
	"fmt"
	"strings"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
)

// retentionPrefix begins the names of the keys that are terms.
const retentionPrefix = "retention."

// longestLease is the longest lease that a row alone gives, in seconds: of a walk, of an enrolment, or of a session of
// a replica that is silent.
const longestLease = 60

// floor is a lower bound of a term.
type floor struct {
	seconds float64
	of      string // the key it is the value of; empty for the lease
	why     string
}

// floorsOf returns the lower bounds of the term of a key.
func (s Set) floorsOf(key string) []floor {
	floors := []floor{{longestLease, "", "a lease is held by the row for as long"}}
	under := func(other, why string) { floors = append(floors, floor{s.number(other), other, why}) }
	switch key {
	case RetentionOperationKeysSeconds:
		under(OperationKeyPromiseSeconds, "clients are promised that a key gets the same answer for as long")
	case RetentionEventsSeconds:
		under(AuditDedupeWindowSeconds, "what repeats within it is counted on its first event")
	case RetentionTasksSeconds:
		under(TaskStaleSweepIntervalSeconds, "the sweep ends a task by its row")
	case RetentionIdentitiesSeconds, RetentionCredentialsSeconds:
		under(StreamMaxAgeSeconds, "a session may last as long on what it was opened with")
	}
	return floors
}

// tooShort returns the first key whose term is shorter than one of its floors, and the refusal.
func (s Set) tooShort() (string, error) {
	for _, k := range keys {
		if !strings.HasPrefix(k.Name, retentionPrefix) {
			continue
		}
		n := s.number(k.Name)
		for _, f := range s.floorsOf(k.Name) {
			if n >= f.seconds {
				continue
			}
			what := fmt.Sprintf("%g seconds", f.seconds)
			remedy := fmt.Sprintf("choose %g or more", f.seconds)
			if f.of != "" {
				what = fmt.Sprintf("%s (%g)", f.of, f.seconds)
				remedy += ", or shorten " + f.of + " first"
			}
			return k.Name, fault.New(commonv1.Reason_REASON_POLICY_VALUE_REFUSED,
				fmt.Sprintf("%s %g is shorter than %s: %s", k.Name, n, what, f.why),
				fault.Remedy(remedy), fault.Unmet(fmt.Sprintf("%s is less than %s", k.Name, what)))
		}
	}
	return "", nil
}
