package view_test

import (
	"context"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/testing/protocmp"
	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/readmodel/list"
	"github.com/gpuaas/mesh/services/readmodel/view"
)

const (
	agentDown = commonv1.DriftReason_DRIFT_REASON_AGENT_DOWN
	cloned    = commonv1.DriftReason_DRIFT_REASON_CLONED_IDENTITY_DETECTED
)

// judge appends a verdict about a node, or about the control plane if the node is empty.
func (k *kit) judge(node string, version int64, reason commonv1.DriftReason, at time.Time,
	ended *recoveryv1.VerdictPeriod,
) *recoveryv1.NodeVerdict {
	k.t.Helper()
	v := &recoveryv1.NodeVerdict{
		NodeId: node, Reason: reason, Version: version, UserState: commonv1.UserState_USER_STATE_TEMPORARY,
		Severity: commonv1.Severity_SEVERITY_P1, Owner: "agent / host", NextAction: "wait for it",
		ObservedAt: timestamppb.New(at.Add(-time.Second)), DetectedAt: timestamppb.New(at), Ended: ended,
	}
	k.AppendVersion(v, version)
	return v
}

// endOf returns the period of a verdict's reason, which ended at a time.
func endOf(v *recoveryv1.NodeVerdict, at time.Time) *recoveryv1.VerdictPeriod {
	return &recoveryv1.VerdictPeriod{
		NodeId: v.GetNodeId(), Reason: v.GetReason(), Severity: v.GetSeverity(), ObservedAt: v.GetObservedAt(),
		DetectedAt: v.GetDetectedAt(), EndedAt: timestamppb.New(at), Version: v.GetVersion(),
	}
}

// judged writes up to which time recovery has judged everything.
func (k *kit) judged(through time.Time) {
	k.t.Helper()
	_, err := k.DB.Pool(pg.RoleRecovery).Exec(testkit.Context(k.t), `INSERT INTO mesh.judged (service, through)
		VALUES ('recovery', $1) ON CONFLICT (service) DO UPDATE SET through = EXCLUDED.through`, through)
	if err != nil {
		k.t.Fatal(err)
	}
}

// Scenario: recovery judges a node. People of the operator see the verdict and when recovery has ceased to judge, and a
// person of the node's tenant sees neither.
func TestANodeShowsItsVerdictToPeopleOfTheOperator(t *testing.T) {
	k := newKit(t)
	k.judged(k.Now().Add(-time.Hour)) // as the migration of the table leaves it
	n, err := k.node(k.A.NodeName)
	if err != nil || n.GetVerdict() != nil || n.GetVerdictStaleSince() == nil {
		t.Fatalf("before anything was judged: %v, %v", n, err)
	}
	at := k.Now().Truncate(time.Microsecond)
	before := k.judge(k.A.NodeID, 1, agentDown, at.Add(-time.Minute), nil)
	want := k.judge(k.A.NodeID, 2, cloned, at, endOf(before, at))
	k.judged(at)
	k.sync()
	want.Ended = nil
	if n, err = k.node(k.A.NodeName); err != nil || n.GetVerdictStaleSince() != nil {
		t.Errorf("fresh: stale since %v, %v", n.GetVerdictStaleSince(), err)
	}
	if diff := cmp.Diff(want, n.GetVerdict(), protocmp.Transform()); diff != "" {
		t.Errorf("the verdict (-want +got):\n%s", diff)
	}
	stale := k.Now().Add(-time.Minute).Truncate(time.Microsecond)
	k.judged(stale)
	if n, err = k.node(k.A.NodeName); err != nil || !n.GetVerdictStaleSince().AsTime().Equal(stale) {
		t.Errorf("stale since %v, want %v; %v", n.GetVerdictStaleSince().AsTime(), stale, err)
	}
	if n, err = k.node("shared"); err != nil || n.GetVerdict() != nil || n.GetVerdictStaleSince() == nil {
		t.Errorf("a node that was not judged: %v, %v", n, err)
	}
	err = k.read(scopeOf(t, k.A.ID), func(ctx context.Context, s *view.Snapshot) error {
		_, err := s.Node(ctx, k.A.NodeName)
		return err
	})
	if !fault.Has(err, commonv1.Reason_REASON_PERMISSION_DENIED) {
		t.Errorf("a person of the tenant asks for its node: %v", err)
	}
}

// Scenario: recovery judges, but not one of the nodes, whose evidence is of a newer build. The verdict about that node
// is stale since then, or since recovery has judged nothing, whichever is earlier.
func TestAVerdictIsStaleByItself(t *testing.T) {
	k := newKit(t)
	now := k.Now().Truncate(time.Microsecond)
	v := k.judge(k.A.NodeID, 1, agentDown, now.Add(-time.Minute), nil)
	for i, c := range []struct{ own, judged, want time.Duration }{
		{own: time.Second, want: time.Second},
		{own: time.Hour, want: time.Hour},
		{own: time.Minute, judged: time.Hour, want: time.Hour},
		{own: 2 * time.Hour, judged: time.Hour, want: 2 * time.Hour},
	} {
		k.judged(now.Add(-c.judged))
		v.Version, v.StaleSince = int64(i+2), timestamppb.New(now.Add(-c.own))
		k.AppendVersion(v, v.GetVersion())
		k.sync()
		n, err := k.node(k.A.NodeName)
		if err != nil {
			t.Fatal(err)
		}
		if got := n.GetVerdictStaleSince().AsTime(); !got.Equal(now.Add(-c.want)) {
			t.Errorf("%+v: stale since %v, now is %v", c, got, now)
		}
		if n, err = k.node(k.B.NodeName); err != nil || (n.GetVerdictStaleSince() != nil) != (c.judged > 0) {
			t.Errorf("%+v: another node is stale since %v; %v", c, n.GetVerdictStaleSince(), err)
		}
	}
}

// Scenario: a node has had three reasons, one after the other, the last of which lasts. Its history has them, the
// newest first, page by page, and nothing of another node or of the control plane.
func TestTheHistoryOfANodesVerdicts(t *testing.T) {
	k := newKit(t)
	at := k.Now().Truncate(time.Microsecond)
	first := k.judge(k.A.NodeID, 1, agentDown, at.Add(-3*time.Hour), nil)
	well := k.judge(k.A.NodeID, 2, 0, at.Add(-2*time.Hour), endOf(first, at.Add(-2*time.Hour)))
	second := k.judge(k.A.NodeID, 3, cloned, at.Add(-time.Hour), nil)
	third := k.judge(k.A.NodeID, 4, agentDown, at.Add(-time.Microsecond), endOf(second, at.Add(-time.Microsecond)))
	// The same reason, of another family: its period goes on.
	changed := k.judge(k.A.NodeID, 5, agentDown, at.Add(-time.Microsecond), nil)
	other := k.judge(k.B.NodeID, 1, agentDown, at.Add(-time.Microsecond), nil)
	k.judge("", 1, commonv1.DriftReason_DRIFT_REASON_CONTROL_PLANE_OUTAGE, at, nil)
	k.sync()
	_ = third
	lasts := endOf(changed, at)
	lasts.EndedAt = nil
	want := []*recoveryv1.VerdictPeriod{
		lasts, endOf(second, at.Add(-time.Microsecond)), endOf(first, well.GetDetectedAt().AsTime()),
	}
	var got []*recoveryv1.VerdictPeriod
	err := k.read(list.All(), func(ctx context.Context, s *view.Snapshot) error {
		for page := (list.Page{Size: 1}); ; {
			items, next, err := s.NodeVerdicts(ctx, k.A.NodeName, page)
			if len(items) != 1 || err != nil {
				t.Fatalf("a page of one has %v, %v", items, err)
			}
			got = append(got, items...)
			if next == "" {
				return nil
			}
			page.Token = next
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got, protocmp.Transform()); diff != "" {
		t.Errorf("the history (-want +got):\n%s", diff)
	}
	err = k.read(list.All(), func(ctx context.Context, s *view.Snapshot) error {
		items, _, err := s.NodeVerdicts(ctx, k.B.NodeID, list.Page{})
		if len(items) != 1 || !items[0].GetDetectedAt().AsTime().Equal(other.GetDetectedAt().AsTime()) {
			t.Errorf("of another node: %v", items)
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
	for _, ref := range []string{k.A.NodeID, k.B.NodeID, k.Shared, "nothing"} {
		err := k.read(scopeOf(t, k.A.ID), func(ctx context.Context, s *view.Snapshot) error {
			_, _, err := s.NodeVerdicts(ctx, ref, list.Page{})
			return err
		})
		if !fault.Has(err, commonv1.Reason_REASON_PERMISSION_DENIED) {
			t.Errorf("a person of a tenant asks for %s: %v", ref, err)
		}
	}
	if _, err := k.node(k.A.NodeID); err != nil {
		t.Error(err)
	}
}
