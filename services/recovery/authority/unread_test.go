package authority_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/recovery/authority"
	"github.com/gpuaas/mesh/services/recovery/identity"
)

// One node has a state that this build does not know: it is served without one, every other node is served as it is,
// and pings are answered.
func TestAnUnknownStateStopsNoOtherNode(t *testing.T) {
	b := newBench(t, authority.Config{Poll: time.Hour})
	odd, plain := ids.New(), ids.New()
	b.change(odd, "odd")
	b.change(plain, "plain")
	err := pg.InTx(b.ctx, b.pool, func(ctx context.Context, tx pgx.Tx) error {
		r, err := identity.LockOne(ctx, tx, odd)
		if err != nil {
			return err
		}
		m, err := identity.ReadMoment(ctx, tx)
		if err != nil {
			return err
		}
		r.Enter(commonv1.NodeIdentityState_NODE_IDENTITY_STATE_RETIRED, "ada", "test", m.Now, m.Era)
		_, err = identity.Save(ctx, tx, r)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	testkit.WithoutValue(t, commonv1.NodeIdentityState_NODE_IDENTITY_STATE_RETIRED)
	b.changed.Notify()
	s, _ := b.watch()
	s.ping(1)
	seen := map[string]commonv1.NodeIdentityState{}
	for {
		f := b.next(s)
		for _, n := range f.GetSnapshot().GetNodes() {
			seen[n.GetNodeId()] = n.GetState()
		}
		if d := f.GetDelta(); d != nil {
			seen[d.GetNodeId()] = d.GetState()
		}
		if f.GetPong() != nil {
			break
		}
	}
	if state, ok := seen[odd]; !ok || state != commonv1.NodeIdentityState_NODE_IDENTITY_STATE_UNSPECIFIED {
		t.Errorf("the node with the unknown state: %v, %t", state, ok)
	}
	if state := seen[plain]; state != commonv1.NodeIdentityState_NODE_IDENTITY_STATE_PENDING {
		t.Errorf("the other node: %v", state)
	}
	if err := b.poller.Health(b.ctx); err != nil {
		t.Errorf("health: %v", err)
	}
}
