package judge_test

import (
	"testing"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
)

// full makes the disk of a node full, as lifecycle's gate tells it.
func (n *machine) full() {
	n.gate.Host = &commonv1.HostFacts{StateDisk: &commonv1.StateDisk{Path: "/var/lib/agent", Full: true, Detail: "full"}}
}

// TestANodeThatIsDownHasNoFullDisk checks that what the gate told of a node's disk hides that the node is away for the
// threshold and no longer, and counts again when it is back.
func TestANodeThatIsDownHasNoFullDisk(t *testing.T) {
	k := newKit(t)
	n := k.up()
	n.full()
	k.put(n.gate)
	k.listen(30 * time.Second)
	k.round()
	k.wantReasons(n.id(), diskFull)
	k.put()
	k.lose(n)
	k.listen(staleAfter - time.Second)
	k.round()
	k.wantReasons(n.id(), diskFull)
	k.listen(time.Second)
	k.round()
	k.wantReasons(n.id(), diskFull, agentDown)
	k.put()
	k.back(n)
	k.round()
	k.wantReasons(n.id(), diskFull, agentDown, diskFull)
}

// behind has the judge's consumer be behind: another node's event is unread for longer than upToDate.
func (k *kit) behind() {
	k.t.Helper()
	k.append(k.made().identity)
	k.listen(20 * time.Second)
}

// TestAnOldGateIsNoVerdict checks that what was read of a gate while later events are unread for long begins no
// verdict, and counts once all is read.
func TestAnOldGateIsNoVerdict(t *testing.T) {
	k := newKit(t)
	over, stays := k.up(), k.up()
	for _, n := range []*machine{over, stays} {
		n.full()
		k.put(n.gate)
	}
	k.behind()
	k.round()
	k.wantReasons(over.id())
	over.gate.Host = nil
	k.put(over.gate)
	k.listen(5 * time.Second)
	k.round()
	k.wantReasons(over.id())
	k.wantReasons(stays.id(), diskFull)
}

// TestAVerdictOutlastsUnreadEvents checks that a verdict about a gate is not withdrawn because events are unread.
func TestAVerdictOutlastsUnreadEvents(t *testing.T) {
	k := newKit(t)
	n := k.up()
	n.gate.Admitted = false
	k.put(n.gate)
	k.listen(5 * time.Second)
	k.round()
	k.wantReasons(n.id(), notAdmitted)
	k.put()
	k.behind()
	_, err := k.db.OwnerPool().Exec(k.ctx, `UPDATE recovery.judgement SET due_at = mesh.clock() WHERE node_id = $1`,
		n.id())
	k.must(err)
	k.round()
	k.wantReasons(n.id(), notAdmitted)
}

// TestTheFirstStartJudgesWhenTheLogIsRead checks that nodes that were there when drift was installed are judged when
// the log has been read, and not by what their identities were then.
func TestTheFirstStartJudgesWhenTheLogIsRead(t *testing.T) {
	k := newKit(t)
	freed, stays := k.made(), k.made()
	for _, n := range []*machine{freed, stays} {
		_, err := k.db.OwnerPool().Exec(k.ctx, `
			WITH j AS (INSERT INTO recovery.judgement (node_id, identity_state, generation, session_version, due_at)
				VALUES ($1, 'held', 0, 0, mesh.clock()))
			INSERT INTO recovery.evidence (node_id, part, source, reason, observed_at, detail, correlation_id, version)
			VALUES ($1, 'certificate', 'identity', 'identity_held', mesh.clock(), '', '', 1)`, n.id())
		k.must(err)
	}
	k.versions["node_identity.changed"+freed.id()] = 1
	k.append(freed.identity)
	k.listen(20 * time.Second)
	k.round()
	k.wantReasons(freed.id())
	k.wantReasons(stays.id())
	k.put()
	k.round()
	k.wantReasons(freed.id())
	k.wantReasons(stays.id(), held)
}
