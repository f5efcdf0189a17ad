package collect

import (
	"cmp"
	"slices"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
)

const (
	// AddressesFresh is how long changed addresses are evidence by default: the new ones are recorded at once, and nothing
	// is left to repair.
	AddressesFresh = time.Minute
	// RejectedFresh is how long after the last rejection by the ingress it counts by default. Nodeapi reports one that
	// goes on once a minute, and an agent that is refused tries more often than that.
	RejectedFresh = 5 * time.Minute
)

// Settings are what is configured of how events are kept as evidence. Zero fields take the defaults.
type Settings struct {
	AddressesFresh time.Duration // how long changed addresses are evidence
	RejectedFresh  time.Duration // how long after the last rejection by the ingress it counts
	// RefusedFresh is how long it counts that an attempt to enrol had no recovery token that is good; zero: until the node
	// has another certificate or a session.
	RefusedFresh time.Duration
	// OptionalTypes are the types of tasks that an agent may lack without being outdated.
	OptionalTypes []commonv1.TaskType
}

// defaulted returns the settings with the defaults of fields that are zero.
func (s Settings) defaulted() Settings {
	s.AddressesFresh = cmp.Or(s.AddressesFresh, AddressesFresh)
	s.RejectedFresh = cmp.Or(s.RejectedFresh, RejectedFresh)
	return s
}

// refusedUntil returns until when an attempt to enrol counts that had no recovery token that is good; the zero time:
// until something newer is known of the node.
func (s Settings) refusedUntil(at time.Time) time.Time {
	if s.RefusedFresh <= 0 {
		return time.Time{}
	}
	return at.Add(s.RefusedFresh)
}

// required reports whether an agent that lacks a type of task is outdated.
func (s Settings) required(t commonv1.TaskType) bool { return !slices.Contains(s.OptionalTypes, t) }
