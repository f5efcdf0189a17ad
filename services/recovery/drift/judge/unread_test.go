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
// that is worse than the present one, and no milder one before a build that can read it judges the node.
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
	k.enter(n, activeState, "")
	k.round()
	k.wantReasons(n.id(), held, revoked)
	if due := k.count(`SELECT count(*) FROM recovery.judgement WHERE node_id = $1
		AND due_at = mesh.clock() + interval '30 seconds'`, n.id()); due != 1 {
		t.Error("the node is not due again for a build that reads the evidence")
	}
	_, err := k.db.OwnerPool().Exec(k.ctx, `DELETE FROM recovery.evidence WHERE source = 'of_a_newer_build'`)
	k.must(err)
	k.put()
	k.listen(30 * time.Second)
	k.round()
	k.wantReasons(n.id(), held, revoked, unspecified)
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
