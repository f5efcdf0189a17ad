package project_test

import (
	"math/rand/v2"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/readmodel/project"
	"github.com/gpuaas/mesh/services/readmodel/project/projecttest"
)

// TestIDsOfPeriodsAreInTheOrderOfTime checks that the id of a period is valid, is the same each time, and is larger
// than that of an earlier one; and that two nodes have different ones at the same time.
func TestIDsOfPeriodsAreInTheOrderOfTime(t *testing.T) {
	node, other, last := ids.New(), ids.New(), ""
	for micros := int64(1_800_000_000_000_000 - 1500); micros < 1_800_000_000_000_000+1500; micros++ {
		at := time.UnixMicro(micros)
		id := project.PeriodID(node, at)
		if !ids.Valid(id) || id <= last || id != project.PeriodID(node, at) || id == project.PeriodID(other, at) {
			t.Fatalf("the id of the period of %d is %s after %s", micros, id, last)
		}
		last = id
	}
}

// TestVerdictsAreProjectedInAnyOrder checks that the events of a node's verdicts, in any order and twice, make the
// newest verdict and one row for each time with a reason; that a rebuild makes the same; and that a cut takes what has
// ended, and with a node's row what remains of it.
func TestVerdictsAreProjectedInAnyOrder(t *testing.T) {
	testkit.IO(t)
	ctx := testkit.Context(t)
	l := projecttest.New(t)
	p := l.Projector()
	node := &recoveryv1.NodeIdentity{
		NodeId: ids.New(), Name: "n", State: commonv1.NodeIdentityState_NODE_IDENTITY_STATE_RETIRED,
		StateAt: timestamppb.Now(),
	}
	l.Append(node)
	began := time.Now().Add(-time.Hour)
	verdict := func(id string, version int64, reason commonv1.DriftReason, ended int64) *recoveryv1.NodeVerdict {
		at := func(v int64) *timestamppb.Timestamp {
			return timestamppb.New(began.Add(time.Duration(v) * time.Minute))
		}
		v := &recoveryv1.NodeVerdict{
			NodeId: id, Reason: reason, Version: version, ObservedAt: at(version), DetectedAt: at(version),
		}
		if ended > 0 {
			v.Ended = &recoveryv1.VerdictPeriod{
				NodeId: id, Reason: commonv1.DriftReason_DRIFT_REASON_AGENT_DOWN, DetectedAt: at(ended), EndedAt: at(version),
				Version: ended,
			}
		}
		return v
	}
	const (
		down   = commonv1.DriftReason_DRIFT_REASON_AGENT_DOWN
		outage = commonv1.DriftReason_DRIFT_REASON_CONTROL_PLANE_OUTAGE
	)
	puts := []*recoveryv1.NodeVerdict{
		verdict(node.GetNodeId(), 1, down, 0), verdict(node.GetNodeId(), 2, 0, 1), verdict(node.GetNodeId(), 3, down, 0),
		verdict(node.GetNodeId(), 4, commonv1.DriftReason_DRIFT_REASON_IDENTITY_REVOKED_OR_FENCED, 3),
		verdict("", 1, outage, 0), verdict("", 2, 0, 1), verdict("", 3, outage, 0),
	}
	puts = append(puts, puts...)
	rand.Shuffle(len(puts), func(i, j int) { puts[i], puts[j] = puts[j], puts[i] })
	for _, v := range puts {
		l.AppendVersion(proto.CloneOf(v), v.GetVersion())
	}
	// A reason that was concluded at no time is set aside.
	l.AppendRaw(pg.RoleRecovery, events.Event{
		Kind: project.KindVerdict, AggregateType: "verdict", AggregateID: "x", AggregateVersion: 1,
		Payload: &recoveryv1.NodeVerdict{NodeId: ids.New(), Reason: down},
	})
	l.Number()
	must(t, p.Drain(ctx))
	all := map[string]string{
		"SELECT string_agg(version || ' ' || (node_id = '" + project.ControlPlane + "'), ', ' ORDER BY node_id) " +
			"FROM readmodel.verdict": "3 true, 4 false",
		"SELECT string_agg(version || ' ' || (body->>'ended_at' IS NOT NULL), ', ' ORDER BY period_id) " +
			"FROM readmodel.verdict_period WHERE node_id = '" + node.GetNodeId() + "'": "2 true, 4 true, 4 false",
		"SELECT string_agg(version || ' ' || (body->>'ended_at' IS NOT NULL), ', ' ORDER BY period_id) " +
			"FROM readmodel.verdict_period WHERE node_id = '" + project.ControlPlane + "'": "2 true, 3 false",
		"SELECT count(*)::text FROM readmodel.parked_event": "1",
	}
	expect := func(what string) {
		t.Helper()
		for sql, want := range all {
			if got := text(t, l, sql); got != want {
				t.Errorf("%s: %s = %q, want %q", what, sql, got, want)
			}
		}
	}
	expect("projected")
	if report, err := p.Verify(ctx); err != nil || !report.Equal() {
		t.Errorf("a fresh projection differs: %+v, %v", report, err)
	}
	_, err := p.Rebuild(ctx)
	must(t, err)
	expect("made anew")

	cut := func(rows, want string) {
		t.Helper()
		testkit.SetClockOffset(l.DB, 2*time.Hour)
		defer testkit.SetClockOffset(l.DB, 0)
		got := text(t, l, `SELECT x.cut::text FROM readmodel.cut_`+rows+
			`('1 second', '00000000-0000-0000-0000-000000000000', 500) x`)
		if got != want {
			t.Errorf("a cut of %s took %s rows, want %s", rows, got, want)
		}
	}
	cut("verdict_periods", "3")
	cut("verdicts", "0")
	cut("nodes", "1")
	cut("verdict_periods", "1")
	cut("verdicts", "1")
	if got := text(t, l, `SELECT (SELECT count(*) FROM readmodel.verdict) || ' ' || count(*)
		FROM readmodel.verdict_period`); got != "1 1" {
		t.Errorf("verdicts and periods of the control plane: %s", got)
	}
}
