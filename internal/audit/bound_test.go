package audit_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/audit"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/testkit"
)

// An actor that makes up a new name each time gets twenty entries and one that counts the rest; another actor's
// refusals are written as usual.
func TestAFloodOfDifferentRefusalsIsBoundedAndSaysSo(t *testing.T) {
	w := newWorld(t)
	ctx := person(testkit.Context(t))
	denied := fault.New(commonv1.Reason_REASON_PERMISSION_DENIED, "your roles do not allow this")
	filled := 0
	fill := func(_ context.Context, e *audit.Entry) { filled++; e.WorkspaceID = "w-" + e.SubjectID }
	refuse := func(actor string, i int) {
		t.Helper()
		e := audit.Entry{Action: "workspace.decommission", Actor: actor, SubjectType: "workspace", SubjectID: fmt.Sprint(i)}
		if err := w.log.RefuseBounded(ctx, e, denied, fill); !errors.Is(err, denied) {
			t.Fatal(err)
		}
	}
	for i := range 50 {
		refuse("mallory", i)
		refuse("mallory", 0) // another refusal of the same kind writes no entry
	}
	refuse("bob", 1)
	got := w.entries(t)
	if len(got) != 22 || filled != 21 {
		t.Fatalf("%d entries, %d filled", len(got), filled)
	}
	for i, e := range got[:20] {
		if e.GetActor() != "mallory" || e.GetSubjectId() != fmt.Sprint(i) || e.GetWorkspaceId() != "w-"+e.GetSubjectId() ||
			e.GetOutcome() != audit.Refused {
			t.Errorf("entry %d: %v", i, e)
		}
	}
	if e := got[20]; e.GetAction() != audit.LeftOut || e.GetActor() != "mallory" || e.GetSubjectId() != "mallory" ||
		e.GetCount() != 1 {
		t.Errorf("what is left out: %v", e)
	}
	if e := got[21]; e.GetActor() != "bob" || e.GetAction() != "workspace.decommission" {
		t.Errorf("another actor: %v", e)
	}
	// A window later the number of refusals that were left out is written, and so is the number of repeated ones.
	if err := w.log.RunOnce(ctx); err != nil {
		t.Fatal(err)
	}
	testkit.SetClockOffset(w.db, 301*time.Second)
	if err := w.log.RunOnce(ctx); err != nil {
		t.Fatal(err)
	}
	counts := map[string]int64{}
	for _, e := range w.entries(t)[22:] {
		counts[e.GetAction()] = e.GetCount()
	}
	if len(counts) != 2 || counts[audit.LeftOut] != 30 || counts["workspace.decommission"] != 51 {
		t.Errorf("summaries: %v", counts)
	}
	// A refusal that could not be written is written by the next round: a short outage of the database lets no refusal go
	// unrecorded.
	gone, cancel := context.WithCancel(ctx)
	cancel()
	late := audit.Entry{Action: "node.fence", Actor: "carol", SubjectType: "node", SubjectID: "n1"}
	if err := w.log.RefuseBounded(gone, late, denied, nil); !errors.Is(err, denied) {
		t.Error(err)
	}
	if n := len(w.entries(t)); n != 24 {
		t.Fatalf("%d entries before the next round", n)
	}
	if err := w.log.RunOnce(ctx); err != nil {
		t.Fatal(err)
	}
	if got := w.entries(t); len(got) != 25 || got[24].GetActor() != "carol" || got[24].GetCount() != 1 ||
		got[24].GetCorrelationId() != "c-1" {
		t.Fatalf("after the next round: %v", got[24:])
	}
	// An error that is no decision is not recorded, and a nil log records nothing.
	broken := fault.New(commonv1.Reason_REASON_UNAVAILABLE, "")
	if err := w.log.RefuseBounded(ctx, audit.Entry{Action: "a"}, broken, fill); !errors.Is(err, broken) {
		t.Error(err)
	}
	if err := (*audit.Log)(nil).RefuseBounded(ctx, audit.Entry{Action: "a"}, denied, fill); !errors.Is(err, denied) {
		t.Error(err)
	}
	if n := len(w.entries(t)); n != 25 {
		t.Errorf("%d entries at the end", n)
	}
}
