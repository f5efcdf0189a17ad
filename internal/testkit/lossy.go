package testkit

import (
	"bytes"
	"context"
	"io"
	"net"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/gpuaas/mesh/internal/pg"
)

// LossyPool opens a pool for a test, and returns it with a function after whose call the answer to the next COMMIT over
// the pool is lost: the server has committed, and the connection is closed in place of the answer.
func LossyPool(tb testing.TB, url string) (*pgxpool.Pool, func()) {
	tb.Helper()
	cfg, err := pgxpool.ParseConfig(url)
	if err != nil {
		tb.Fatal(err)
	}
	next := &atomic.Bool{}
	dial := cfg.ConnConfig.DialFunc
	cfg.ConnConfig.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := dial(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		return &lossyConn{Conn: conn, next: next}, nil
	}
	cfg.ConnConfig.RuntimeParams[pg.FormatSetting] = pg.Format
	pool, err := pgxpool.NewWithConfig(tb.Context(), cfg)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(pool.Close)
	return pool, func() { next.Store(true) }
}

// lossyConn is closed in place of the answer to a COMMIT that is read from it while next is set.
type lossyConn struct {
	net.Conn

	next *atomic.Bool
}

func (c *lossyConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if bytes.Contains(b[:n], []byte("COMMIT\x00")) && c.next.CompareAndSwap(true, false) {
		_ = c.Close()
		return 0, io.ErrUnexpectedEOF
	}
	return n, err
}
