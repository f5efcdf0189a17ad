package audit_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/gpuaas/mesh/internal/audit"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/internal/testkit"
)

// lostAnswers closes a connection in place of the server's answer to a COMMIT, while next is set.
type lostAnswers struct{ next atomic.Bool }

type lossyConn struct {
	net.Conn

	lost *lostAnswers
}

func (c *lossyConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if bytes.Contains(b[:n], []byte("COMMIT\x00")) && c.lost.next.CompareAndSwap(true, false) {
		_ = c.Close()
		return 0, io.ErrUnexpectedEOF
	}
	return n, err
}

func (l *lostAnswers) pool(t *testing.T, url string) *pgxpool.Pool {
	t.Helper()
	cfg, err := pgxpool.ParseConfig(url)
	if err != nil {
		t.Fatal(err)
	}
	dial := cfg.ConnConfig.DialFunc
	cfg.ConnConfig.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := dial(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		return &lossyConn{Conn: conn, lost: l}, nil
	}
	cfg.ConnConfig.RuntimeParams[pg.FormatSetting] = pg.Format
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	return pool
}

// Scenario: the connection is lost after the server has committed counts, in a round that writes them and in the
// decision that ends their window. Each refusal is counted once.
func TestACommitOfUnknownOutcomeIsNotCountedTwice(t *testing.T) {
	w := newWorld(t)
	ctx := person(testkit.Context(t))
	lost := &lostAnswers{}
	pool := lost.pool(t, w.db.URL(pg.RoleLifecycle))
	log, err := audit.New(audit.Deps{
		Logger: testkit.Logger(t), Pool: pool, Schema: pg.RoleLifecycle, Policy: policy.Fixed{Set: policy.Defaults()},
		Wake: &events.Signal{},
	})
	if err != nil {
		t.Fatal(err)
	}
	entry := audit.Entry{
		Action: "workspace.reset", Outcome: audit.Refused, SubjectType: "workspace", SubjectID: ids.New(), Reason: "no",
	}
	repeat := func(n int) {
		t.Helper()
		for range n {
			if err := log.Repeated(ctx, entry); err != nil {
				t.Fatal(err)
			}
		}
	}
	round := func() error { return log.RunOnce(ctx) }
	repeat(4)
	lost.next.Store(true)
	if err := round(); !errors.Is(err, pg.ErrCommitUnknown) {
		t.Fatalf("the round whose commit was not answered: %v", err)
	}
	if err := round(); err != nil {
		t.Fatal(err)
	}
	var n int
	if err := w.db.Pool(pg.RoleLifecycle).QueryRow(ctx,
		`SELECT count FROM lifecycle.audit_window`).Scan(&n); err != nil || n != 4 {
		t.Fatalf("%d of 4 are counted: %v", n, err)
	}
	repeat(3)
	lost.next.Store(true)
	err = pg.InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) error {
		_, err := log.Record(ctx, tx, audit.Entry{
			Action: entry.Action, SubjectType: entry.SubjectType, SubjectID: entry.SubjectID,
		})
		return err
	})
	if !errors.Is(err, pg.ErrCommitUnknown) {
		t.Fatalf("the decision whose commit was not answered: %v", err)
	}
	if err := round(); err != nil {
		t.Fatal(err)
	}
	got := w.entries(t)
	if len(got) != 3 || got[1].GetCount() != 7 || got[1].GetDetails().AsMap()["recovered"] != "true" {
		t.Fatalf("entries: %v", got)
	}
	if err := w.db.Pool(pg.RoleLifecycle).QueryRow(ctx,
		`SELECT count(*) FROM lifecycle.audit_window`).Scan(&n); err != nil || n != 0 {
		t.Errorf("%d windows are left: %v", n, err)
	}
}
