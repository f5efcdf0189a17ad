package judge_test

import (
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/policy"
)

// cutOff lets time pass in which another replica beats and that of the kit, which was cut off from the database, does
// not. The kit's replica beats again after it.
func (k *kit) cutOff(d time.Duration) {
	k.t.Helper()
	own := k.replica
	k.replica = ids.New()
	k.beat()
	k.listen(d)
	k.round()
	k.replica = own
	k.beat()
}

// TestTheThresholdOfSilenceIsThePolicys checks that a node is judged silent as long after it was heard last as the key
// says.
func TestTheThresholdOfSilenceIsThePolicys(t *testing.T) {
	for value, after := range map[string]time.Duration{"": staleAfter, "60": time.Minute, "300": 5 * time.Minute} {
		k := newKit(t)
		if value != "" {
			var err error
			k.policy, err = policy.NewSet(map[string]string{policy.HeartbeatStaleAfterSeconds: value})
			k.must(err)
			k.judge = k.another()
		}
		n := k.up()
		k.listen(time.Minute)
		k.lose(n)
		k.listen(after - time.Second)
		k.round()
		k.wantReasons(n.id())
		k.listen(time.Second)
		k.round()
		k.wantReasons(n.id(), agentDown)
	}
}

// TestAReplicaThatComesBackBringsItsNodes checks that the nodes of a replica that was cut off from the database for
// longer than the threshold are well when it reports their sessions again, and have the whole threshold afterwards.
func TestAReplicaThatComesBackBringsItsNodes(t *testing.T) {
	k := newKit(t)
	n := k.up()
	k.listen(30 * time.Second)
	k.cutOff(staleAfter + 20*time.Second)
	k.wantReasons(n.id(), agentDown)
	k.put(n.session) // as roster.Repeat reports it
	k.round()
	k.wantReasons(n.id(), agentDown, unspecified)
	k.lose(n)
	k.listen(staleAfter - time.Second)
	k.round()
	k.wantReasons(n.id(), agentDown, unspecified)
	k.listen(time.Second)
	k.round()
	k.wantReasons(n.id(), agentDown, unspecified, agentDown)
}

// TestASessionThatEndsAfterItsReplicaWasLost checks that a node whose session has ended when its replica comes back is
// silent since it was heard there, not since the replica's last beat.
func TestASessionThatEndsAfterItsReplicaWasLost(t *testing.T) {
	k := newKit(t)
	recent, long := k.up(), k.up()
	k.listen(30 * time.Second)
	long.session.LastSeenAt = timestamppb.New(k.now().Add(10 * time.Second))
	k.cutOff(staleAfter + 20*time.Second)
	k.wantReasons(recent.id(), agentDown)
	long.session.State = closedState
	k.put(long.session)
	k.lose(recent)
	k.round()
	k.wantReasons(recent.id(), agentDown, unspecified)
	k.wantReasons(long.id(), agentDown) // it has still been silent for too long
	k.put()                             // the consumer reads the events of verdicts too, lest it seem to be behind
	k.listen(staleAfter - time.Second)
	k.round()
	k.wantReasons(recent.id(), agentDown, unspecified)
	k.listen(time.Second)
	k.round()
	k.wantReasons(recent.id(), agentDown, unspecified, agentDown)
}

// TestALateSessionThatWasHeardAgainHasTheThreshold checks that the silence of a session that was late, was heard once
// more and ended before that was reported counts from when it was heard last.
func TestALateSessionThatWasHeardAgainHasTheThreshold(t *testing.T) {
	k := newKit(t)
	n := k.up()
	k.listen(time.Minute)
	n.session.Late = true
	k.put(n.session)
	k.listen(staleAfter - time.Minute - 5*time.Second)
	k.lose(n)
	k.listen(staleAfter - time.Second)
	k.round()
	k.wantReasons(n.id())
	k.listen(time.Second)
	k.round()
	k.wantReasons(n.id(), agentDown)
}

// TestSilenceIsCountedByTheDatabasesClock checks that a replica whose clock is wrong moves no threshold: a node was not
// heard after its session was reported as ended, nor before it was served.
func TestSilenceIsCountedByTheDatabasesClock(t *testing.T) {
	k := newKit(t)
	k.listen(20 * time.Second)
	ahead, behind := k.up(), k.up()
	for n, wrong := range map[*machine]time.Duration{ahead: time.Hour, behind: -time.Hour} {
		n.session.State, n.session.LastSeenAt = closedState, timestamppb.New(k.now().Add(wrong))
		k.put(n.session)
	}
	k.listen(staleAfter - time.Second)
	k.round()
	k.wantReasons(behind.id())
	k.wantReasons(ahead.id())
	k.listen(time.Second)
	k.round()
	k.wantReasons(behind.id(), agentDown)
	k.wantReasons(ahead.id(), agentDown)
}
