package keyset

import (
	"context"
	"errors"
	"net"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
)

// A replica that starts while the database cannot be reached waits for it, and gives up when its context ends.
func TestAReplicaWaitsForItsDatabase(t *testing.T) {
	b := newBench(t)
	cfg := b.db.Pool(pg.RoleRecovery).Config().Copy()
	dial := cfg.ConnConfig.DialFunc
	var back atomic.Bool
	tried := make(chan struct{}, 1)
	cfg.ConnConfig.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
		if back.Load() {
			return dial(ctx, network, addr)
		}
		select {
		case tried <- struct{}{}:
		default:
		}
		return nil, &net.OpError{Op: "dial", Net: network, Err: syscall.ECONNREFUSED}
	}
	pool, err := pgxpool.NewWithConfig(b.ctx, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	open := func(ctx context.Context) chan error {
		opened := make(chan error, 1)
		go func() {
			_, err := Open(ctx, Deps{
				Logger: testkit.Logger(t), Pool: pool, Wake: &events.Signal{}, Service: pg.RoleRecovery, ReplicaID: ids.New(),
			}, signer(t.TempDir()))
			opened <- err
		}()
		return opened
	}
	ctx, stop := context.WithCancel(b.ctx)
	gone := open(ctx)
	for range 2 {
		<-tried
	}
	stop()
	if err := <-gone; !errors.Is(err, context.Canceled) {
		t.Errorf("the start ended with %v", err)
	}
	opened := open(b.ctx)
	for range 2 {
		<-tried
	}
	back.Store(true)
	if err := <-opened; err != nil {
		t.Error(err)
	}
}
