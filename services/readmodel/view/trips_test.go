package view_test

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/readmodel/view"
)

// trips counts what a connection sends and waits for.
type trips struct{ n int }

func (c *trips) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	c.n++
	return ctx
}

func (*trips) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

func (c *trips) TraceBatchStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceBatchStartData) context.Context {
	c.n++
	return ctx
}

func (*trips) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}

func (*trips) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData) {}

// TestRoundTripsOfLists: the snapshot with the beginning of its transaction, the list with what it is compared with, and the end; for nodes the names of
// their workspaces too.
func TestRoundTripsOfLists(t *testing.T) {
	k := newKit(t)
	config := k.DB.Pool(pg.RoleReadmodel).Config()
	counted := &trips{}
	config.ConnConfig.Tracer, config.MaxConns = counted, 1
	pool, err := pgxpool.NewWithConfig(testkit.Context(t), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	reader := view.NewReader(pool, policy.Fixed{Set: policy.Defaults()})
	for _, tt := range []struct {
		name string
		want int
		list func(ctx context.Context, s *view.Snapshot) error
	}{
		{"workspaces", 3, func(ctx context.Context, s *view.Snapshot) error {
			_, _, err := s.Workspaces(ctx, view.WorkspaceFilter{}, view.Page{Size: 8})
			return err
		}},
		{"nodes", 4, func(ctx context.Context, s *view.Snapshot) error {
			_, _, err := s.Nodes(ctx, view.NodeFilter{}, view.Page{Size: 8})
			return err
		}},
	} {
		counted.n = 0
		if err := reader.Read(testkit.Context(t), view.All(), tt.list); err != nil {
			t.Fatal(err)
		}
		if counted.n != tt.want {
			t.Errorf("a list of %s took %d round trips, want %d", tt.name, counted.n, tt.want)
		}
	}
}
