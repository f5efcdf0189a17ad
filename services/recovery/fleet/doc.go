// Package fleet decides about the fleet as a whole: when so much fails at once that automatic recoveries must stop,
// which failures have one cause, and how large the fleet is. It owns the fleet brake, the incidents, and the comparison
// of the fleet's counts with their rows.
//
// It evaluates in rounds of the watchdog, in the watchdog's transaction, and under the lock of the brake's row where a
// round writes. It counts failures from the recovery records and sightings that the watchdog stores, and never changes
// them; it knows no rule about a workspace and asks lifecycle for nothing.
//
// Guarantees: the brake engages when more than a fraction of the units have failed within a window, or when recovery
// lacks the records of too many nodes, and is released by a person or once the cause has been gone for a time; one
// incident is open for a kind and a key, however often its cause occurs; each of these decisions is in the audit log.
package fleet
