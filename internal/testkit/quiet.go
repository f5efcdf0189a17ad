package testkit

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/pg"
)

// ListeningSignal returns a signal to which a connection passes on what is notified in the database, as the signals of
// a process do that has a listener.
func ListeningSignal(tb testing.TB, d *Database) *events.Signal {
	tb.Helper()
	numbered := &events.Signal{}
	listener, err := events.NewListener(events.ListenerDeps{
		Pool: d.Pool(pg.RoleSequencer), Numbered: numbered, Logger: Logger(tb),
	})
	if err != nil {
		tb.Fatal(err)
	}
	ctx, cancel := context.WithCancel(Context(tb))
	done := make(chan error, 1)
	go func() { done <- listener.Run(ctx) }()
	tb.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			tb.Error(err)
		}
	})
	Eventually(tb, Patience, func() error {
		if !numbered.Listening() {
			return errors.New("nothing listens yet")
		}
		return nil
	})
	return numbered
}

// Statements counts the statements of a pool by their names. The zero value is ready.
type Statements struct {
	mu    sync.Mutex
	calls map[string]int
}

// Calls returns how often a statement was sent.
func (s *Statements) Calls(name string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.calls[name]
}

// TraceQueryStart implements pgx.QueryTracer.
func (s *Statements) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	name, _, _ := strings.Cut(strings.TrimPrefix(data.SQL, "/* "), " ")
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.calls == nil {
		s.calls = map[string]int{}
	}
	s.calls[name]++
	return ctx
}

// TraceQueryEnd implements pgx.QueryTracer.
func (s *Statements) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// CountedPool returns a pool of a role, and the counts of what is sent over it.
func CountedPool(tb testing.TB, d *Database, role string) (*pgxpool.Pool, *Statements) {
	tb.Helper()
	cfg, err := pgxpool.ParseConfig(d.URL(role))
	if err != nil {
		tb.Fatal(err)
	}
	counts := &Statements{}
	cfg.ConnConfig.Tracer = counts
	pool, err := pgxpool.NewWithConfig(Context(tb), cfg)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(pool.Close)
	return pool, counts
}
