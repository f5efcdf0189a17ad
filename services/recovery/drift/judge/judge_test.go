package judge_test

import (
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/policy"
	beats "github.com/gpuaas/mesh/internal/replicas"
	"github.com/gpuaas/mesh/internal/testkit"
)

// staleAfter is the threshold of the default policy.
var staleAfter = policy.Defaults().HeartbeatStaleAfter()

// TestDecisionsAboutAnIdentityAreVerdicts checks that each decision becomes a verdict in the first round after its
// event, whether the node is connected or not, and ends with it.
func TestDecisionsAboutAnIdentityAreVerdicts(t *testing.T) {
	for _, tt := range []struct {
		name     string
		state    commonv1.NodeIdentityState
		alarm    string
		want     commonv1.DriftReason
		severity commonv1.Severity
	}{
		{"held", heldState, "", commonv1.DriftReason_DRIFT_REASON_IDENTITY_HELD, commonv1.Severity_SEVERITY_P1},
		{
			"join state lost", heldState, "join_state_lost", commonv1.DriftReason_DRIFT_REASON_JOIN_STATE_LOST,
			commonv1.Severity_SEVERITY_P1,
		},
		{
			"copied", heldState, "cloned_identity_detected", commonv1.DriftReason_DRIFT_REASON_CLONED_IDENTITY_DETECTED,
			commonv1.Severity_SEVERITY_P0,
		},
		{
			"token reused", heldState, "token_reuse", commonv1.DriftReason_DRIFT_REASON_TOKEN_REUSE,
			commonv1.Severity_SEVERITY_P0,
		},
		{"fenced", fencedState, "", revoked, commonv1.Severity_SEVERITY_P0},
		{
			"quarantined", quarantinedState, "", revoked,
			commonv1.Severity_SEVERITY_P0,
		},
		{"retired", retiredState, "", revoked, commonv1.Severity_SEVERITY_P0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			k := newKit(t)
			n := k.up()
			k.enter(n, tt.state, tt.alarm)
			if changed := k.round(); changed != 1 {
				t.Fatalf("%d verdicts changed", changed)
			}
			v := k.wantReasons(n.id(), tt.want)
			if v.GetSeverity() != tt.severity || v.GetNextAction() == "" || v.GetOwner() == "" ||
				v.GetCorrelationId() != "c-"+n.id() || len(v.GetEvidence()) == 0 || v.GetNodeId() != n.id() ||
				!v.GetDetectedAt().AsTime().Equal(k.now()) || v.GetObservedAt() == nil {
				t.Errorf("verdict %v", v)
			}
			k.pass(time.Minute)
			k.beat()
			k.enter(n, activeState, "")
			k.round()
			v = k.wantReasons(n.id(), tt.want, unspecified)
			if p := v.GetEnded(); p.GetReason() != tt.want || p.GetVersion() != 1 || p.GetSeverity() != tt.severity ||
				p.GetEndedAt().AsTime().Sub(p.GetDetectedAt().AsTime()) != time.Minute {
				t.Errorf("ended: %v", p)
			}
		})
	}
}

// TestAnotherNextActionIsANewVersion checks that a verdict whose reason stays and whose next action does not is
// published, and remains one period.
func TestAnotherNextActionIsANewVersion(t *testing.T) {
	k := newKit(t)
	n := k.up()
	k.enter(n, quarantinedState, "")
	k.round()
	first := k.wantReasons(n.id(), revoked)
	k.pass(time.Minute)
	k.enter(n, fencedState, "")
	k.round()
	second := k.wantReasons(n.id(), revoked, revoked)
	if second.GetNextAction() == first.GetNextAction() || second.GetEnded() != nil ||
		!proto.Equal(second.GetDetectedAt(), first.GetDetectedAt()) {
		t.Errorf("%v, then %v", first, second)
	}
	k.enter(n, activeState, "")
	k.round()
	if last := k.wantReasons(n.id(), revoked, revoked, unspecified); last.GetEnded().GetVersion() != 1 {
		t.Errorf("ended: %v", last.GetEnded())
	}
}

// TestASilentNodeIsDownAfterTheThreshold checks the whole of a short outage of a node: the end of its session is no
// verdict, its silence is one after the threshold, and its return ends the period.
func TestASilentNodeIsDownAfterTheThreshold(t *testing.T) {
	k := newKit(t)
	n := k.up()
	k.listen(30 * time.Second)
	k.lose(n)
	heard := k.now()
	k.round()
	k.listen(staleAfter - time.Second)
	k.round()
	k.wantReasons(n.id())
	k.listen(time.Second)
	if changed := k.round(); changed != 1 {
		t.Fatalf("%d verdicts changed", changed)
	}
	v := k.wantReasons(n.id(), agentDown)
	if !v.GetObservedAt().AsTime().Equal(heard) || !v.GetDetectedAt().AsTime().Equal(heard.Add(staleAfter)) {
		t.Errorf("heard at %s: %v", heard, v)
	}
	k.listen(10 * time.Minute)
	if changed := k.round(); changed != 0 {
		t.Errorf("%d verdicts because time passed", changed)
	}
	k.back(n)
	k.round()
	v = k.wantReasons(n.id(), agentDown, unspecified)
	if p := v.GetEnded(); !p.GetObservedAt().AsTime().Equal(heard) || !p.GetEndedAt().AsTime().Equal(k.now()) ||
		!p.GetDetectedAt().AsTime().Equal(heard.Add(staleAfter)) {
		t.Errorf("ended: %v", p)
	}
	if rows := k.count(`SELECT count(*) FROM recovery.verdict_period WHERE node_id = $1 AND reason = 'agent_down'
		AND ended_at - detected_at = interval '10 minutes'`, n.id()); rows != 1 {
		t.Errorf("%d periods", rows)
	}
}

// TestANodeThatNeverConnectedIsDownAfterTheThreshold counts from when its identity became active.
func TestANodeThatNeverConnectedIsDownAfterTheThreshold(t *testing.T) {
	k := newKit(t)
	k.listen(time.Minute)
	n := k.made()
	n.identity.State = pendingState
	k.put(n.identity)
	k.listen(2 * staleAfter)
	k.round()
	k.enter(n, activeState, "")
	k.listen(staleAfter - time.Second)
	k.round()
	k.wantReasons(n.id())
	k.listen(time.Second)
	k.round()
	k.wantReasons(n.id(), agentDown)
}

// TestOnlyTheSessionThatServesCounts checks that a session that is refused beside it, and an event that is late, change
// nothing, and that an agent without heartbeats is silent since the last one.
func TestOnlyTheSessionThatServesCounts(t *testing.T) {
	k := newKit(t)
	n := k.up()
	other := &nodev1.SessionChanged{SessionId: ids.New(), NodeId: n.id(), ReplicaId: k.replica, Generation: 2}
	k.put(other)
	other.State = closedState
	k.put(other)
	old := proto.CloneOf(n.session)
	k.back(n)
	old.State = closedState
	k.put(old)
	k.listen(2 * staleAfter)
	k.round()
	k.wantReasons(n.id())
	n.session.Late = true
	k.put(n.session) // heard last when it was opened
	k.round()
	k.wantReasons(n.id(), agentDown)
	n.session.Late = false
	k.put(n.session)
	k.round()
	k.wantReasons(n.id(), agentDown, unspecified)
}

// TestAClosedGateCountsAfterAMoment checks that a gate that opens soon after a session gives no verdict, and one that
// stays closed does.
func TestAClosedGateCountsAfterAMoment(t *testing.T) {
	k := newKit(t)
	notAdmitted := commonv1.DriftReason_DRIFT_REASON_NODE_NOT_ADMITTED
	n, slow := k.made(), k.made()
	n.gate.Admitted, slow.gate.Admitted = false, false
	k.put(n.identity, slow.identity, n.gate, slow.gate, n.session, slow.session)
	k.round()
	n.gate.Admitted = true
	k.put(n.gate)
	k.listen(5 * time.Second)
	k.round()
	k.wantReasons(n.id())
	k.wantReasons(slow.id(), notAdmitted)
	k.lose(slow)
	k.round()
	k.wantReasons(slow.id(), notAdmitted, unspecified)
}

// TestNoNodeIsJudgedWhileNoReplicaListens checks that an outage of nodeapi is one verdict, at which no row of a node
// changes, and that nodes have the threshold and ten seconds after it.
func TestNoNodeIsJudgedWhileNoReplicaListens(t *testing.T) {
	k := newKit(t)
	lost, served := k.up(), k.up()
	k.lose(lost)
	k.round()
	rows := k.count(`SELECT count(*) FROM recovery.evidence WHERE node_id <> $1`, theFleet)
	before := k.nodes()
	k.pass(beats.SilentAfter - time.Second)
	if changed := k.round(); changed != 0 {
		t.Fatal("an outage before the replica is silent")
	}
	k.pass(time.Second)
	for range 3 {
		k.round()
		k.pass(staleAfter)
	}
	v := k.wantReasons(theFleet, outage)
	if v.GetNodeId() != "" || v.GetSeverity() != commonv1.Severity_SEVERITY_P1 || len(v.GetEvidence()) != 1 {
		t.Errorf("%v", v)
	}
	if after := k.nodes(); after != before {
		t.Errorf("rows of nodes were written:\n%s\n%s", before, after)
	}
	if n := k.count(`SELECT count(*) FROM recovery.evidence WHERE node_id <> $1`, theFleet); n != rows {
		t.Errorf("%d rows of evidence, %d before", n, rows)
	}
	k.beat()
	k.round()
	if v = k.wantReasons(theFleet, outage, unspecified); v.GetEnded().GetReason() != outage {
		t.Errorf("%v", v)
	}
	k.listen(10*time.Second + staleAfter - time.Second)
	k.back(served)
	k.round()
	k.wantReasons(lost.id())
	k.listen(time.Second)
	k.round()
	k.wantReasons(lost.id(), agentDown)
	k.wantReasons(served.id())
	if all := k.verdicts(""); len(all) != 3 {
		t.Errorf("%d events of verdicts, want three", len(all))
	}
}

// TestTheNextRoundIsWhenAnOutageBegins: a round is due as soon as all replicas count as gone, and not up to five
// seconds later.
func TestTheNextRoundIsWhenAnOutageBegins(t *testing.T) {
	k := newKit(t)
	k.up()
	k.round()
	k.pass(beats.SilentAfter - time.Second)
	out, err := k.judge.RunOnce(k.ctx)
	k.must(err)
	if out.Next > 1100*time.Millisecond {
		t.Errorf("the next round is due in %s, and the outage begins in a second", out.Next)
	}
}

// TestAnOutageBeginsWhenItIsSet: thirty seconds after the last beat in place of as soon as all replicas count as gone.
func TestAnOutageBeginsWhenItIsSet(t *testing.T) {
	k := newKit(t)
	k.outageAfter = 30 * time.Second
	k.judge = k.another()
	k.up()
	k.round()
	k.pass(29 * time.Second)
	if changed := k.round(); changed != 0 {
		t.Fatal("an outage before its time")
	}
	k.pass(2 * time.Second)
	k.round()
	k.wantReasons(theFleet, outage)
}

// nodes returns, as text, the rows of nodes and their places in the table.
func (k *kit) nodes() string {
	k.t.Helper()
	var out string
	k.must(k.db.OwnerPool().QueryRow(k.ctx, `SELECT jsonb_agg(to_jsonb(x) || jsonb_build_object('at', x.ctid::text)
		ORDER BY x.node_id)::text FROM recovery.judgement x`).Scan(&out))
	return out
}

// TestAReplicaThatWasKilledLeavesSilentNodes checks that nodes of a replica that beats no more, while another listens,
// are down a threshold after its last beat, unless they have come back elsewhere.
func TestAReplicaThatWasKilledLeavesSilentNodes(t *testing.T) {
	k := newKit(t)
	k.listen(20 * time.Second)
	gone, moved := k.up(), k.up()
	last := k.now()
	k.replica = ids.New() // from now on another beats
	k.beat()
	k.listen(20 * time.Second)
	k.round()
	before := k.nodes()
	k.listen(20 * time.Second)
	k.round()
	if after := k.nodes(); after != before {
		t.Error("rows of nodes were written before they were down")
	}
	k.back(moved)
	k.listen(staleAfter - 40*time.Second - time.Second)
	k.round()
	k.wantReasons(gone.id())
	k.listen(time.Second)
	k.round()
	v := k.wantReasons(gone.id(), agentDown)
	if !v.GetObservedAt().AsTime().Equal(last) {
		t.Errorf("the replica beat at %s: %v", last, v)
	}
	k.wantReasons(moved.id())
	k.back(gone)
	k.round()
	k.wantReasons(gone.id(), agentDown, unspecified)
}

// TestRollbackModeIsAVerdict checks that rollback mode is a verdict about every node, which has the mode's incident,
// and ends with it.
func TestRollbackModeIsAVerdict(t *testing.T) {
	k := newKit(t)
	incident := ids.New()
	testkit.SetRollback(k.db, true)
	_, err := k.db.OwnerPool().Exec(k.ctx, `UPDATE recovery.rollback SET incident_id = $1`, incident)
	k.must(err)
	k.round()
	k.round()
	v := k.wantReasons(theFleet, commonv1.DriftReason_DRIFT_REASON_CONTROL_PLANE_ROLLBACK)
	if v.GetCorrelationId() != incident {
		t.Errorf("the verdict has the incident %q, want %s", v.GetCorrelationId(), incident)
	}
	testkit.SetRollback(k.db, false)
	k.round()
	k.wantReasons(theFleet, commonv1.DriftReason_DRIFT_REASON_CONTROL_PLANE_ROLLBACK, unspecified)
}

// TestJudgesAtOnceWriteOneVerdict checks that of replicas that judge at the same time one writes each verdict.
func TestJudgesAtOnceWriteOneVerdict(t *testing.T) {
	k := newKit(t)
	nodes := make([]*machine, 40)
	for i := range nodes {
		nodes[i] = k.made()
		k.append(nodes[i].identity, nodes[i].session, nodes[i].gate)
	}
	k.put()
	k.round()
	for _, n := range nodes {
		n.identity.State = fencedState
		k.append(n.identity)
	}
	k.put()
	k.pass(time.Minute) // and no replica beats
	var judges sync.WaitGroup
	for range 4 {
		judge := k.another()
		judges.Go(func() {
			for {
				out, err := judge.RunOnce(k.ctx)
				if err != nil {
					t.Error(err)
				}
				if err != nil || !out.More && out.Judged == 0 {
					return
				}
			}
		})
	}
	judges.Wait()
	for _, n := range nodes {
		k.wantReasons(n.id(), revoked)
	}
	k.wantReasons(theFleet, outage)
}

// TestARestJudgesAndWritesNothing checks that rounds without news, and events that say the same again, write no row.
func TestARestJudgesAndWritesNothing(t *testing.T) {
	k := newKit(t)
	n := k.up()
	k.put(n.identity, n.session, n.gate)
	k.round()
	before := k.digest()
	for range 3 {
		k.listen(time.Minute)
		if changed := k.round(); changed != 0 {
			t.Fatalf("%d verdicts changed", changed)
		}
	}
	if after := k.digest(); after != before {
		t.Errorf("rows were written:\n%s\n%s", before, after)
	}
	noted := k.count(`SELECT count(*) FROM mesh.judged WHERE service = 'recovery' AND through = mesh.clock()`)
	if noted != 1 {
		t.Error("it is not noted up to when all is judged")
	}
}

// TestAJudgeThatDiesLeavesItsWorkToAnother checks that evidence that was kept and not judged is judged by the next
// replica, and that events which were read before are not needed for it.
func TestAJudgeThatDiesLeavesItsWorkToAnother(t *testing.T) {
	k := newKit(t)
	n := k.up()
	k.enter(n, fencedState, "")
	k.judge = k.another()
	k.round()
	k.wantReasons(n.id(), revoked)
}

// TestAFleetIsJudgedInBatches checks that 2,000 nodes that are lost at once are judged in transactions of 500, each
// once.
func TestAFleetIsJudgedInBatches(t *testing.T) {
	k := newKit(t)
	const size = 2000
	nodes := make([]*machine, size)
	var all []proto.Message
	for i := range nodes {
		nodes[i] = k.made()
		all = append(all, nodes[i].identity, nodes[i].session, nodes[i].gate)
	}
	k.append(all...)
	k.put()
	if changed := k.round(); changed != 0 {
		t.Fatalf("%d verdicts on nodes that are well", changed)
	}
	all = all[:0]
	for _, n := range nodes {
		n.session.State = closedState
		all = append(all, n.session)
	}
	k.append(all...)
	k.put()
	k.round()
	k.listen(staleAfter + 10*time.Second)
	began := time.Now()
	if changed := k.round(); changed != size {
		t.Errorf("%d verdicts changed, want %d", changed, size)
	}
	t.Logf("%d nodes judged in %s", size, time.Since(began))
	if list := k.verdicts(""); len(list) != size {
		t.Errorf("%d events, want %d", len(list), size)
	}
	if n := k.count(`SELECT count(*) FROM recovery.verdict WHERE reason = $1`, names.Of(agentDown)); n != size {
		t.Errorf("%d verdicts are stored, want %d", n, size)
	}
}
