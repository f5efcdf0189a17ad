package judge_test

import (
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
)

// unreadable adds evidence of a newer build about nodes.
func (k *kit) unreadable(nodes ...*machine) {
	k.t.Helper()
	all := make([]string, len(nodes))
	for i, n := range nodes {
		all[i] = n.id()
	}
	_, err := k.db.OwnerPool().Exec(k.ctx, `
		INSERT INTO recovery.evidence (node_id, part, source, reason, observed_at, detail, correlation_id, version)
		SELECT n, 'host', 'of_a_newer_build', 'of_a_newer_build', mesh.clock(), '', '', 1 FROM unnest($1::uuid[]) n`, all)
	k.must(err)
}

// TestEvidenceOfANewerBuildHidesNothing checks that a node with evidence which this build cannot read has every verdict
// that is worse than the present one, and no milder one before a build that can read it judges the node. Until then its
// verdict says since when it is stale, by one event however long that lasts.
func TestEvidenceOfANewerBuildHidesNothing(t *testing.T) {
	k := newKit(t)
	n := k.up()
	k.listen(30 * time.Second)
	k.unreadable(n)
	k.enter(n, heldState, "")
	k.round()
	k.wantReasons(n.id(), held)
	k.enter(n, fencedState, "")
	k.round()
	k.wantReasons(n.id(), held, revoked)
	k.pass(time.Second)
	k.enter(n, activeState, "")
	at := k.now()
	k.round()
	v := k.wantReasons(n.id(), held, revoked, revoked)
	if !v.GetStaleSince().AsTime().Equal(at) || v.GetEnded() != nil || len(v.GetEvidence()) == 0 {
		t.Errorf("the node is not judged since %v: %v", at, v)
	}
	if due := k.count(`SELECT count(*) FROM recovery.judgement WHERE node_id = $1
		AND due_at = mesh.clock() + interval '30 seconds'`, n.id()); due != 1 {
		t.Error("the node is not due again for a build that reads the evidence")
	}
	for range 3 {
		k.listen(30 * time.Second)
		k.round()
	}
	k.wantReasons(n.id(), held, revoked, revoked)
	if open := k.count(`SELECT count(*) FROM recovery.verdict_period WHERE node_id = $1`, n.id()); open != 1 {
		t.Errorf("%d reasons have ended, want 1", open)
	}
	k.readable()
	k.listen(30 * time.Second)
	k.round()
	if v = k.wantReasons(n.id(), held, revoked, revoked, unspecified); v.GetStaleSince() != nil {
		t.Errorf("judged again: %v", v)
	}
}

// readable removes all evidence of a newer build.
func (k *kit) readable() {
	k.t.Helper()
	_, err := k.db.OwnerPool().Exec(k.ctx, `DELETE FROM recovery.evidence WHERE source = 'of_a_newer_build'`)
	k.must(err)
	k.put()
}

// TestANodeThatIsNotJudgedSaysSo checks that a node of which nothing was wrong says so as well, and that a verdict
// which stays as it was is up to date again once the node is judged: because the evidence can be read, or because the
// reason is proven without it.
func TestANodeThatIsNotJudgedSaysSo(t *testing.T) {
	k := newKit(t)
	n := k.up()
	k.unreadable(n)
	n.full()
	k.put(n.gate)
	n.gate.Host = nil
	k.put(n.gate)
	k.round()
	first := k.wantReasons(n.id(), unspecified)
	if first.GetStaleSince() == nil || first.GetUserState() != normal || first.GetHealthySince() != nil {
		t.Errorf("not judged: %v", first)
	}
	k.readable()
	k.listen(30 * time.Second)
	k.round()
	if v := k.wantReasons(n.id(), unspecified, unspecified); v.GetStaleSince() != nil {
		t.Errorf("judged again: %v", v)
	}
	k.enter(n, fencedState, "")
	k.round()
	k.unreadable(n)
	k.enter(n, activeState, "")
	k.round()
	if v := k.wantReasons(n.id(), unspecified, unspecified, revoked, revoked); v.GetStaleSince() == nil {
		t.Errorf("not judged: %v", v)
	}
	k.enter(n, fencedState, "")
	k.round()
	v := k.wantReasons(n.id(), unspecified, unspecified, revoked, revoked, revoked)
	if v.GetStaleSince() != nil || v.GetEnded() != nil || len(v.GetEvidence()) == 0 {
		t.Errorf("proven again: %v", v)
	}
}

// TestEvidenceOfANewerBuildEndsTheRound checks that a whole batch of silent nodes with evidence that this build cannot
// read is judged once, and does not stand before the others for ever.
func TestEvidenceOfANewerBuildEndsTheRound(t *testing.T) {
	k := newKit(t)
	nodes := make([]*machine, 501)
	var up, lost []proto.Message
	for i := range nodes {
		nodes[i] = k.made()
		up = append(up, nodes[i].identity, nodes[i].session)
	}
	k.append(up...)
	k.put()
	k.round()
	for _, n := range nodes {
		n.session.State = closedState
		lost = append(lost, n.session)
	}
	k.append(lost...)
	k.put()
	k.unreadable(nodes...)
	k.listen(staleAfter + 10*time.Second)
	for range 3 { // three batches are more than there are
		out, err := k.judge.RunOnce(k.ctx)
		k.must(err)
		if out.More {
			continue
		}
		if n := k.count(`SELECT count(*) FROM recovery.verdict WHERE reason = 'agent_down'`); n != len(nodes) {
			t.Errorf("%d of %d nodes are down", n, len(nodes))
		}
		return
	}
	t.Error("the round takes the same nodes again and again")
}
