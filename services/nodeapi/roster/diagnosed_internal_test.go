package roster

import (
	"fmt"
	"log/slog"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
)

// TestASessionKeepsFewDiagnostics: the admission has all diagnostics of Hello, a report has all of its own, and each
// other fact has the newest, first of what is not over.
func TestASessionKeepsFewDiagnostics(t *testing.T) {
	many := func(prefix string, ended bool) []*commonv1.Diagnostic {
		var out []*commonv1.Diagnostic
		for i := range mostDiagnostics {
			d := &commonv1.Diagnostic{DedupeKeyHash: fmt.Sprint(prefix, i)}
			if ended && i > 0 {
				d.EndedAt = timestamppb.Now()
			}
			out = append(out, d)
		}
		return out
	}
	r := New(slog.New(slog.DiscardHandler), Config{}, nil)
	s := r.Add("session", Identity{NodeID: "node"}, nil, time.Time{}, time.Time{})
	s.Welcomed("instance", 1, 1, "nonce", "", AgentFacts{Diags: many("a", true)})
	const admitted = commonv1.SessionState_SESSION_STATE_ADMITTED
	check := func(what string, f *nodev1.SessionChanged, count int, first, last string) {
		t.Helper()
		list := f.GetDiagnostics()
		if len(list) != count || list[0].GetDedupeKeyHash() != first || list[count-1].GetDedupeKeyHash() != last {
			t.Errorf("%s: %d diagnostics: %v", what, len(list), list)
		}
	}
	check("the admission", s.Fact(admitted, true), 64, "a0", "a63")
	check("a fact before the gate is raised", s.Fact(admitted, false), 8, "a0", "a63")
	s.SetWorkReady()
	check("a fact after it", s.Fact(admitted, false), 8, "a0", "a63")
	check("a report", s.Diagnosed(many("b", false)), 64, "b0", "b63")
	check("a fact after the report", s.Fact(admitted, false), 8, "b56", "b63")
	if len(s.diags) != keptDiagnostics || cap(s.diags) > keptDiagnostics {
		t.Errorf("the session keeps %d of %d", len(s.diags), cap(s.diags))
	}
	if f := s.Diagnosed(many("b", false)[60:]); f != nil {
		t.Errorf("nothing is new, and reported: %v", f)
	}
}
