package roster

import (
	"slices"

	"google.golang.org/protobuf/proto"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
)

const (
	// mostDiagnostics bounds the diagnostics of the events that report an admission or new diagnostics.
	mostDiagnostics = 64
	// keptDiagnostics bounds those that a session keeps, and that each of its other events has. A diagnostic has at most
	// about 800 bytes, so that a session keeps 7 kB, and 5,000 sessions 32 MB, of hosts that all have long ones.
	keptDiagnostics = 8
)

// Diagnosed returns the session as an event reports it, with diagnostics of its host that the agent reported now beside
// those that the session keeps. The session keeps the newest of them for later events. It returns nil if nothing in
// them is new.
func (s *Session) Diagnosed(reported []*commonv1.Diagnostic) *nodev1.SessionChanged {
	s.mu.Lock()
	kept := s.diags
	if len(kept) == 0 && s.hello != nil {
		kept = s.hello.Diags
	}
	merged, changed := MergeDiagnostics(kept, reported)
	if changed {
		s.diags = newest(merged, keptDiagnostics)
	}
	s.mu.Unlock()
	if !changed {
		return nil
	}
	f := s.Fact(s.State(), false)
	f.Diagnostics = merged
	return f
}

// MergeDiagnostics returns a list of diagnostics with later ones at its end, each in the place of an earlier state of
// the same record, and whether anything in them is new. It returns the newest if they are too many for an event, and
// changes neither list.
func MergeDiagnostics(earlier, later []*commonv1.Diagnostic) ([]*commonv1.Diagnostic, bool) {
	out, changed := slices.Clone(earlier), false
	for _, d := range later {
		i := slices.IndexFunc(out, func(old *commonv1.Diagnostic) bool { return sameRecord(old, d) })
		switch {
		case i >= 0 && proto.Equal(out[i], d):
			continue
		case i >= 0:
			out = slices.Delete(out, i, i+1)
		}
		out, changed = append(out, d), true
	}
	return newest(out, mostDiagnostics), changed
}

// newest returns the last diagnostics of a list, in its order: those of failures that are not over, and, if there is
// room, those of failures that are.
func newest(list []*commonv1.Diagnostic, most int) []*commonv1.Diagnostic {
	take, room := make([]bool, len(list)), most
	for _, over := range []bool{false, true} {
		for i := len(list) - 1; i >= 0 && room > 0; i-- {
			if (list[i].GetEndedAt() != nil) == over {
				take[i] = true
				room--
			}
		}
	}
	out := make([]*commonv1.Diagnostic, 0, most-room)
	for i, d := range list {
		if take[i] {
			out = append(out, d)
		}
	}
	return out
}

// sameRecord reports whether d is a later state of the record old. An earlier build of the agent sends no key: of such
// records those of one code are one.
func sameRecord(old, d *commonv1.Diagnostic) bool {
	if old.GetCode() != d.GetCode() || old.GetDedupeKeyHash() != d.GetDedupeKeyHash() {
		return false
	}
	return d.GetDedupeKeyHash() == "" || proto.Equal(old.GetFirstSeenAt(), d.GetFirstSeenAt())
}
