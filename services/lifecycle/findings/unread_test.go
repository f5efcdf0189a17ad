package findings

import (
	"testing"
	"time"

	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/findings/finding"
)

// One of two open findings has a severity that this build does not know. It stays as it is stored, whether its detector
// sees it again or not, and however an agent reports of its disk; the other one is opened, seen again and resolved.
func TestAnUnknownSeverityStopsNoOtherFinding(t *testing.T) {
	b := newBed(t, Config{})
	reported := testkit.SetAside(t, "finding")
	_, odd, oddSubject, _ := b.occupiedNode()
	_, plain, plainSubject, _ := b.occupiedNode()
	_, gone, goneSubject, _ := b.occupiedNode()
	full, other := b.machine(), b.machine()
	for range 2 {
		b.appliesScan("records", odd, plain)
		b.appliesScan(goneSource, gone)
		b.pass(b.sweeper.cfg.Grace + time.Second)
	}
	full.reports(full.session, true)
	all := b.open()
	wantOnly(t, all, oddSubject, plainSubject, goneSubject, "node_disk_full node "+full.node)
	stored := func() string {
		t.Helper()
		return b.text(`SELECT string_agg(kind || ' ' || subject_id || ' ' || severity || ' ' || version || ' ' || count, ', '
			ORDER BY finding_id) FROM lifecycle.finding WHERE severity = 'p2' AND resolved_at IS NULL`)
	}
	for _, subject := range []string{odd.SubjectID, gone.SubjectID, full.node} {
		b.as(superuser, `UPDATE lifecycle.finding SET severity = 'p2' WHERE subject_id = $1`, subject)
	}
	before := stored()
	restore := names.Without(finding.P2)
	defer func() { restore() }()

	if got := b.appliesScan("records", odd, plain); got.Opened != 0 || got.Resolved != 0 {
		t.Errorf("seen again: %+v", got)
	}
	if got := b.appliesScan("records"); got.Opened != 0 || got.Resolved != 1 {
		t.Errorf("seen no longer: %+v", got)
	}
	b.pass(2 * b.sweeper.cfg.GoneAfter)
	b.sweep()
	b.applies(full.report(full.session, true), other.report(other.session, true), full.report(full.session, false))
	if n := reported(); n != 3 {
		t.Errorf("%d findings were reported", n)
	}
	if after := stored(); after != before {
		t.Errorf("what this build does not know has become %s, and was %s", after, before)
	}
	restore()
	other.wants("full", true, "finding")
}
