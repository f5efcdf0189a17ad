package watchdog_test

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/recovery/watchdog"
)

// beginnings counts the transactions of a pool, by what is sent while none is open, and its round trips.
type beginnings struct{ n, trips atomic.Int64 }

func (b *beginnings) note(conn *pgx.Conn) {
	b.trips.Add(1)
	if conn.PgConn().TxStatus() == 'I' {
		b.n.Add(1)
	}
}

func (b *beginnings) TraceQueryStart(ctx context.Context, conn *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	b.note(conn)
	return ctx
}

func (*beginnings) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

func (b *beginnings) TraceBatchStart(ctx context.Context, conn *pgx.Conn, _ pgx.TraceBatchStartData) context.Context {
	b.note(conn)
	return ctx
}

func (*beginnings) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}

func (*beginnings) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData) {}

// counted returns a pool, whose sessions have the settings (names and values), and the counts of what is sent by it.
func (k *kit) counted(settings ...string) (*pgxpool.Pool, *beginnings) {
	k.t.Helper()
	counted := &beginnings{}
	config, err := pgxpool.ParseConfig(k.db.URL(pg.RoleRecovery))
	k.must(err)
	config.ConnConfig.Tracer = counted
	config.ConnConfig.RuntimeParams[pg.FormatSetting] = pg.Format
	for i := 0; i < len(settings); i += 2 {
		config.ConnConfig.RuntimeParams[settings[i]] = settings[i+1]
	}
	pool, err := pgxpool.NewWithConfig(k.ctx, config)
	k.must(err)
	k.t.Cleanup(pool.Close)
	return pool, counted
}

// TestARoundIsOneTransaction checks that a round of an idle mesh is one transaction, at the replica that has the lease
// and at one that has not.
func TestARoundIsOneTransaction(t *testing.T) {
	k := newKit(t)
	pool, counted := k.counted()
	replica := func() *watchdog.Watchdog {
		w, err := watchdog.New(watchdog.Deps{
			Logger: testkit.Logger(t), Pool: pool, Lifecycle: k.owner, Fleet: k.all,
			Policy: policy.Fixed{Set: k.policy},
		}, k.cfg)
		k.must(err)
		return w
	}
	first := replica()
	for _, one := range []struct {
		w    *watchdog.Watchdog
		held bool
	}{{first, true}, {first, true}, {replica(), false}} {
		before := counted.n.Load()
		round, err := one.w.RunOnce(k.ctx)
		k.must(err)
		if n := counted.n.Load() - before; n != 1 || round.Leased != one.held {
			t.Errorf("a round took %d transactions, held: %v, want one and %v", n, round.Leased, one.held)
		}
	}
}

// TestARoundThatAppendsNothingWakesNoSequencer checks that the sequencer is woken only by a round that appended events.
func TestARoundThatAppendsNothingWakesNoSequencer(t *testing.T) {
	k := newKit(t)
	var wake events.Signal
	w, err := watchdog.New(watchdog.Deps{
		Logger: testkit.Logger(t), Pool: k.db.Pool(pg.RoleRecovery), Lifecycle: k.owner, Fleet: k.all,
		Policy: policy.Fixed{Set: k.policy}, Wake: &wake,
	}, k.cfg)
	k.must(err)
	wakes := func() bool {
		t.Helper()
		woken := wake.C()
		_, err := w.RunOnce(k.ctx)
		k.must(err)
		select {
		case <-woken:
			return true
		default:
			return false
		}
	}
	if wakes() {
		t.Error("a round that appended nothing has woken the sequencer")
	}
	k.lose(k.up("acme", "one", byProcess, ids.New()))
	k.listen(130 * time.Second)
	if !wakes() {
		t.Error("a round that opened a recovery has not woken the sequencer")
	}
}
