package judge_test

import (
	"testing"
	"time"

	"github.com/gpuaas/mesh/internal/pg"
	beats "github.com/gpuaas/mesh/internal/replicas"
	"github.com/gpuaas/mesh/services/recovery/silence"
)

// crowd lets time pass in which the replica beats and turns agents away.
func (k *kit) crowd(d time.Duration) {
	k.t.Helper()
	for ; d > 0; d -= 5 * time.Second {
		k.pass(min(d, 5*time.Second))
		_, err := beats.Write(k.ctx, k.db.Pool(pg.RoleNodeAPI), beats.Beat{ReplicaID: k.replica, Crowded: true})
		k.must(err)
	}
}

// TestNoNodeIsDownWhileAgentsAreTurnedAway checks that a node which may be among those that a crowded replica turns
// away is not called down, and has the whole threshold after that.
func TestNoNodeIsDownWhileAgentsAreTurnedAway(t *testing.T) {
	k := newKit(t)
	n := k.up()
	k.listen(30 * time.Second)
	k.lose(n)
	k.listen(5 * time.Second)
	k.crowd(staleAfter + 20*time.Second)
	k.round()
	k.wantReasons(n.id())
	k.listen(silence.Amnesty + staleAfter - time.Second)
	k.round()
	k.wantReasons(n.id())
	k.listen(time.Second)
	k.round()
	k.wantReasons(n.id(), agentDown)
}

// TestACrowdHidesNoNodeForLong checks that a replica which is crowded without end, and one that is crowded again soon,
// excuse the silence of a node for ten minutes and no longer.
func TestACrowdHidesNoNodeForLong(t *testing.T) {
	const excused = 10 * time.Minute
	for _, pause := range []time.Duration{0, 5 * time.Second} {
		k := newKit(t)
		n := k.up()
		k.listen(30 * time.Second)
		k.lose(n)
		k.crowd(5 * time.Second) // from here on it is excused
		k.listen(pause)
		k.crowd(excused - pause)
		for range 5 {
			k.listen(pause)
			k.crowd(5 * time.Second)
		}
		left := silence.Amnesty + staleAfter - 5*(pause+5*time.Second)
		k.crowd(left - time.Second)
		k.round()
		k.wantReasons(n.id())
		k.crowd(time.Second)
		k.round()
		k.wantReasons(n.id(), agentDown)
	}
}
