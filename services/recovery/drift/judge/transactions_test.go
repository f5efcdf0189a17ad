package judge_test

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/internal/reannounce"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/recovery/drift/judge"
)

// beginnings counts the transactions of a pool, by what is sent while none is open.
type beginnings struct{ n atomic.Int64 }

func (b *beginnings) note(conn *pgx.Conn) {
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

// TestAtRestTheJudgeCommitsTwelveTimesAMinute checks that a round without news is one transaction, and that the next
// one comes five seconds later.
func TestAtRestTheJudgeCommitsTwelveTimesAMinute(t *testing.T) {
	k := newKit(t)
	k.up()
	counted := &beginnings{}
	config, err := pgxpool.ParseConfig(k.db.URL(pg.RoleRecovery))
	k.must(err)
	config.ConnConfig.Tracer = counted
	config.ConnConfig.RuntimeParams[pg.FormatSetting] = pg.Format
	pool, err := pgxpool.NewWithConfig(k.ctx, config)
	k.must(err)
	t.Cleanup(pool.Close)
	var wake events.Signal
	judge, err := judge.New(judge.Deps{
		Logger: testkit.Logger(t), Pool: pool, Policy: policy.Fixed{Set: policy.Defaults()}, Wake: &wake,
	})
	k.must(err)
	for range 12 {
		woken, before := wake.C(), counted.n.Load()
		out, err := judge.RunOnce(k.ctx)
		k.must(err)
		if n := counted.n.Load() - before; n != 1 || out.Next != 5*time.Second {
			t.Errorf("a round took %d transactions, and the next is due in %s", n, out.Next)
		}
		select {
		case <-woken:
			t.Error("a round that appended nothing has woken the sequencer")
		default:
		}
		k.listen(5 * time.Second)
	}
}

// TestTheNextRoundIsDueWithTheNextSilence checks that the judge does not wait for its period where a node is down
// before.
func TestTheNextRoundIsDueWithTheNextSilence(t *testing.T) {
	k := newKit(t)
	n := k.up()
	k.listen(time.Minute)
	k.lose(n)
	k.round()
	k.listen(staleAfter - 2*time.Second)
	out, err := k.judge.RunOnce(k.ctx)
	k.must(err)
	if out.Next != 2*time.Second {
		t.Errorf("the next round is due in %s, want two seconds", out.Next)
	}
}

// TestARunningJudgeFollowsEvents checks that an event becomes a verdict without a round being asked for.
func TestARunningJudgeFollowsEvents(t *testing.T) {
	k := newKit(t)
	n := k.up()
	ctx, stop := context.WithCancel(k.ctx)
	ended := make(chan error, 2)
	go func() { ended <- k.judge.Consume(ctx) }()
	go func() { ended <- k.judge.Run(ctx) }()
	n.identity.State = fencedState
	k.append(n.identity)
	k.must(k.sequencer.Drain(k.ctx))
	testkit.Eventually(t, time.Minute, func() error {
		if len(k.verdicts(n.id())) == 0 {
			return context.DeadlineExceeded
		}
		return nil
	})
	stop()
	k.must(<-ended)
	k.must(<-ended)
}

// TestVerdictsAreAnnouncedAgain checks that the present verdicts, that on the control plane among them, are events once
// more, each once.
func TestVerdictsAreAnnouncedAgain(t *testing.T) {
	k := newKit(t)
	first, second := k.up(), k.up()
	k.enter(first, fencedState, "")
	k.enter(second, heldState, "")
	k.pass(time.Minute)
	k.round()
	before := k.verdicts("")
	if len(before) != 3 {
		t.Fatalf("%d verdicts, want three", len(before))
	}
	server := reannounce.NewServer(k.db.Pool(pg.RoleRecovery), func() {}, judge.Announced()...)
	rows := int64(0)
	for after, calls := "", 0; calls < 10; calls++ {
		out, err := server.AnnounceRows(k.ctx, &commonv1.AnnounceRowsRequest{After: after})
		k.must(err)
		rows += out.GetRows()
		if after = out.GetNext(); after == "" {
			break
		}
	}
	if rows != 3 {
		t.Errorf("%d rows were announced, want three", rows)
	}
	for _, v := range before {
		id := v.GetNodeId()
		if id == "" {
			id = theFleet
		}
		k.wantSame(id, v.GetVersion())
	}
}

// wantSame checks that the last two events of an id have one version.
func (k *kit) wantSame(id string, version int64) {
	k.t.Helper()
	list := k.verdicts(id)
	if len(list) != 2 || list[0].GetVersion() != version || list[1].GetVersion() != version ||
		list[0].GetReason() != list[1].GetReason() {
		k.t.Errorf("%s: %v", id, list)
	}
}

// TestWhatIsOverIsCut checks that ended verdicts go after their term, and a node's rows with its identity.
func TestWhatIsOverIsCut(t *testing.T) {
	k := newKit(t)
	n, stays := k.up(), k.up()
	k.enter(n, heldState, "")
	k.enter(stays, heldState, "")
	k.round()
	k.enter(n, activeState, "")
	k.enter(n, retiredState, "")
	k.round()
	if _, err := k.db.Pool(pg.RoleRecovery).Exec(k.ctx, `
		INSERT INTO recovery.identity (node_id, name, state, state_at) VALUES ($1, 'one', 'retired', mesh.clock())`,
		n.id()); err != nil {
		t.Fatal(err)
	}
	cut := func(name string) int {
		t.Helper()
		return k.count(`SELECT x.cut FROM recovery.cut_` + name + `(interval '1 day', '` + theFleet + `', 10) x`)
	}
	if a, b := cut("verdict_periods"), cut("identities"); a != 0 || b != 0 {
		t.Errorf("%d periods and %d identities were cut before their term", a, b)
	}
	k.pass(25 * time.Hour)
	if a, b := cut("verdict_periods"), cut("identities"); a != 1 || b != 1 {
		t.Errorf("%d periods and %d identities were cut, want one of each", a, b)
	}
	for _, table := range []string{"judgement", "evidence", "verdict"} {
		if rows := k.count(`SELECT count(*) FROM recovery.`+table+` WHERE node_id = $1`, n.id()); rows != 0 {
			t.Errorf("%d rows of %s are left of a node that is gone", rows, table)
		}
		if rows := k.count(`SELECT count(*) FROM recovery.`+table+` WHERE node_id = $1`, stays.id()); rows == 0 {
			t.Errorf("no row of %s is left of a node that stands", table)
		}
	}
}
