package roster

import (
	"slices"

	"google.golang.org/protobuf/proto"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
)

// mostDiagnostics bounds the diagnostics that a session keeps: the newest.
const mostDiagnostics = 64

// Diagnosed returns the session as an event reports it, with diagnostics of its host that the agent reported now. The
// session keeps them, and those that it reported before, for later events. It returns nil if nothing in them is new.
func (s *Session) Diagnosed(reported []*commonv1.Diagnostic) *nodev1.SessionChanged {
	s.mu.Lock()
	kept := slices.Clone(s.diags) // events that were made before have the list as it was
	if len(kept) == 0 {
		kept = slices.Clone(s.agent.Diags) // those of Hello, until they were reported
	}
	changed := false
	for _, d := range reported {
		i := slices.IndexFunc(kept, func(old *commonv1.Diagnostic) bool { return sameRecord(old, d) })
		switch {
		case i >= 0 && proto.Equal(kept[i], d):
			continue
		case i >= 0:
			kept = slices.Delete(kept, i, i+1)
		}
		kept, changed = append(kept, d), true
	}
	if changed {
		s.diags = slices.Clip(kept[max(len(kept)-mostDiagnostics, 0):])
	}
	s.mu.Unlock()
	if !changed {
		return nil
	}
	return s.Fact(s.State(), false)
}

// sameRecord reports whether d is a later state of the record old. An earlier build of the agent sends no key: of such
// records those of one code are one.
func sameRecord(old, d *commonv1.Diagnostic) bool {
	if old.GetCode() != d.GetCode() || old.GetDedupeKeyHash() != d.GetDedupeKeyHash() {
		return false
	}
	return d.GetDedupeKeyHash() == "" || proto.Equal(old.GetFirstSeenAt(), d.GetFirstSeenAt())
}
