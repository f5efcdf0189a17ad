package policy

import (
	"errors"
	"maps"
	"time"
)

// Set is a snapshot of all keys: the defaults and what differs from them. It never changes; the zero value is the
// defaults.
type Set struct {
	text    map[string]string  // as stored, only keys that were given
	numbers map[string]float64 // the same, read
}

// Defaults returns the set in which nothing was given.
func Defaults() Set { return Set{} }

// NewSet returns the set with the given values, as stored: an unknown key, a value outside its bounds, or a certificate
// that lives too long for the recovery token is left out and reported in the error, which joins all of them; the set is
// usable nevertheless. Weakenings are not checked here: they were acknowledged when they were stored.
func NewSet(values map[string]string) (Set, error) {
	s := Set{}
	var problems []error
	for name, value := range values {
		k, ok := Lookup(name)
		if !ok {
			problems = append(problems, Set{}.Validate(name, value, Ack{}))
			continue
		}
		n, err := k.check(value)
		if err != nil {
			problems = append(problems, err)
			continue
		}
		s = s.with(name, value, n)
	}
	// A term that is too short counts as absent; if its default is too short as well, so do the keys that are its floors.
	for key, err := s.tooShort(); err != nil; key, err = s.tooShort() {
		problems = append(problems, err)
		if !s.Overridden(key) {
			for _, f := range s.floorsOf(key) {
				s = s.without(f.of)
			}
		}
		s = s.without(key)
	}
	if err := s.consistent(); err != nil {
		problems = append(problems, err)
		s = s.without(CertificateTTLSeconds)
		if s.consistent() != nil {
			s = s.without(RecoveryTokenMaxAgeSeconds)
		}
	}
	return s, errors.Join(problems...)
}

func (s Set) with(key, text string, n float64) Set {
	out := Set{text: maps.Clone(s.text), numbers: maps.Clone(s.numbers)}
	if out.text == nil {
		out.text, out.numbers = map[string]string{}, map[string]float64{}
	}
	out.text[key], out.numbers[key] = text, n
	return out
}

func (s Set) without(key string) Set {
	out := Set{text: maps.Clone(s.text), numbers: maps.Clone(s.numbers)}
	delete(out.text, key)
	delete(out.numbers, key)
	return out
}

// number returns the key's value, else its default.
func (s Set) number(key string) float64 {
	if n, ok := s.numbers[key]; ok {
		return n
	}
	k, _ := Lookup(key)
	return k.defaulted
}

// Get returns the value of a key as text, its default if nothing was given, and whether there is such a key.
func (s Set) Get(key string) (string, bool) {
	if text, ok := s.text[key]; ok {
		return text, true
	}
	k, ok := Lookup(key)
	return k.Default, ok
}

// Given returns the values that were given, by key.
func (s Set) Given() map[string]string { return maps.Clone(s.text) }

// Overridden reports whether a value was given for the key.
func (s Set) Overridden(key string) bool {
	_, ok := s.text[key]
	return ok
}

// Equal reports whether every key has the same value in both sets.
func (s Set) Equal(other Set) bool {
	for _, k := range keys {
		if s.number(k.Name) != other.number(k.Name) {
			return false
		}
	}
	return true
}

// Duration returns a key of seconds, zero for any other.
func (s Set) Duration(key string) time.Duration {
	if k, ok := Lookup(key); !ok || k.Kind != Seconds {
		return 0
	}
	return time.Duration(s.number(key)) * time.Second
}

// RecoveryTokenMaxAge returns how old a recovery token may be and still enrol its node.
func (s Set) RecoveryTokenMaxAge() time.Duration { return s.Duration(RecoveryTokenMaxAgeSeconds) }

// HeartbeatStaleAfter returns how long a node may be silent before its heartbeat is stale.
func (s Set) HeartbeatStaleAfter() time.Duration { return s.Duration(HeartbeatStaleAfterSeconds) }

// TaskStaleSweepInterval returns how often stale tasks are swept.
func (s Set) TaskStaleSweepInterval() time.Duration { return s.Duration(TaskStaleSweepIntervalSeconds) }

// AuditDedupeWindow returns the window in which equal audit rows are counted.
func (s Set) AuditDedupeWindow() time.Duration { return s.Duration(AuditDedupeWindowSeconds) }

// CertificateTTL returns how long a node certificate lives.
func (s Set) CertificateTTL() time.Duration { return s.Duration(CertificateTTLSeconds) }

// StreamMaxAge returns how long one stream lives, before jitter.
func (s Set) StreamMaxAge() time.Duration { return s.Duration(StreamMaxAgeSeconds) }

// StorageLimit returns how many bytes the database may take; 0 if that is not known.
func (s Set) StorageLimit() int64 { return int64(s.number(StorageLimitMebibytes)) << 20 }

// AutoRecovery reports whether nodes may enrol again by themselves.
func (s Set) AutoRecovery() bool { return s.number(AutoRecovery) != 0 }

// RecoveryAttemptsPerHour returns how often one node may try to enrol again within an hour.
func (s Set) RecoveryAttemptsPerHour() int { return int(s.number(RecoveryAttemptsPerHour)) }

// TrustDwell returns how long an agent does not trust the node API before it asks recovery for other trust.
func (s Set) TrustDwell() time.Duration { return s.Duration(TrustDwellSeconds) }

// SagaStepStall returns how long a step may go without progress.
func (s Set) SagaStepStall() time.Duration { return s.Duration(SagaStepStallSeconds) }

// SagaWaitReadyStall returns the same for the step that waits for workloads.
func (s Set) SagaWaitReadyStall() time.Duration { return s.Duration(SagaWaitReadyStallSeconds) }

// SagaStall returns how long a run may take.
func (s Set) SagaStall() time.Duration { return s.Duration(SagaStallSeconds) }

// SagaRetryLimit returns how many retries a window has.
func (s Set) SagaRetryLimit() int { return int(s.number(SagaRetryLimit)) }

// SagaCancelGrace returns how long a cancelled step may take to stop.
func (s Set) SagaCancelGrace() time.Duration { return s.Duration(SagaCancelGraceSeconds) }

// ChurnRecreatesPerHour returns how often a workspace may be recreated within an hour.
func (s Set) ChurnRecreatesPerHour() int { return int(s.number(ChurnRecreatesPerHour)) }

// BrakeFleetFraction returns the share of the fleet whose drift sets the brake.
func (s Set) BrakeFleetFraction() float64 { return s.number(BrakeFleetFraction) }

// BrakeIdentityFraction returns the share of the active nodes that may be refused for records that recovery lacks.
func (s Set) BrakeIdentityFraction() float64 { return s.number(BrakeIdentityFraction) }

// BrakeIdentityLeast returns how many nodes may be refused for that reason in any fleet.
func (s Set) BrakeIdentityLeast() int { return int(s.number(BrakeIdentityLeast)) }

// WorkloadCrashLoopRestarts returns how many restarts of a workload that is not ready yet make a crash loop.
func (s Set) WorkloadCrashLoopRestarts() int { return int(s.number(WorkloadCrashLoopRestarts)) }
