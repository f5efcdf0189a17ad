package view_test

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/readmodel/list"
	"github.com/gpuaas/mesh/services/readmodel/view"
)

// trips counts the round trips of a connection.
type trips struct {
	n     int
	after func(n int) // called when the n-th query has ended, if it is set
}

func (c *trips) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	c.n++
	return ctx
}

func (c *trips) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {
	if c.after != nil {
		c.after(c.n)
	}
}

func (c *trips) TraceBatchStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceBatchStartData) context.Context {
	c.n++
	return ctx
}

func (*trips) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}

func (*trips) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData) {}

// TestRoundTripsOfLists: one trip each for the snapshot with the begin of its transaction, for the list with the query
// beside it, and for the commit; for nodes also one for the names of their workspaces. A list of workspaces whose rows
// have not changed is one statement.
func TestRoundTripsOfLists(t *testing.T) {
	k := newKit(t)
	reader, counted := countedReader(t, k)
	for _, tt := range []struct {
		name string
		want int
		list func(ctx context.Context, s *view.Snapshot) error
	}{
		{"workspaces of a snapshot", 3, func(ctx context.Context, s *view.Snapshot) error {
			_, _, err := s.Workspaces(ctx, view.WorkspaceFilter{}, list.Page{Size: 8})
			return err
		}},
		{"nodes", 4, func(ctx context.Context, s *view.Snapshot) error {
			_, _, err := s.Nodes(ctx, view.NodeFilter{}, list.Page{Size: 8})
			return err
		}},
	} {
		if err := reader.Read(testkit.Context(t), list.All(), tt.list); err != nil { // the decoded messages are kept
			t.Fatal(err)
		}
		counted.n = 0
		if err := reader.Read(testkit.Context(t), list.All(), tt.list); err != nil {
			t.Fatal(err)
		}
		if counted.n != tt.want {
			t.Errorf("a list of %s took %d round trips, want %d", tt.name, counted.n, tt.want)
		}
	}
	counted.n = 0
	found, _, err := reader.Workspaces(testkit.Context(t), list.All(), view.WorkspaceFilter{}, list.Page{Size: 8})
	if err != nil || len(found) == 0 {
		t.Fatalf("%d workspaces, %v", len(found), err)
	}
	if counted.n != 1 {
		t.Errorf("a list of workspaces took %d round trips, want 1", counted.n)
	}
}

// TestListsOfWorkspacesShowWhatChanged rewrites a row under its version, as a rebuild of the projection does: the next
// list has the new body, and if that happens between the statement that reads the keys of a page and the one that reads
// the bodies, the page is read in a snapshot.
func TestListsOfWorkspacesShowWhatChanged(t *testing.T) {
	k := newKit(t)
	reader, counted := countedReader(t, k)
	rewrite := func(text string) {
		t.Helper()
		_, err := k.DB.Pool(pg.RoleReadmodel).Exec(testkit.Context(t), `UPDATE readmodel.workspace
			SET body = body || jsonb_build_object('last_error', $2::text) WHERE workspace_id = $1::uuid`, k.A.WorkspaceID, text)
		if err != nil {
			t.Fatal(err)
		}
	}
	expect := func(what, text string) {
		t.Helper()
		found, _, err := reader.Workspaces(testkit.Context(t), list.All(),
			view.WorkspaceFilter{ID: k.A.WorkspaceID}, list.Page{})
		if err != nil || len(found) != 1 {
			t.Fatalf("%s: %d workspaces, %v", what, len(found), err)
		}
		if got := found[0].GetLastError(); got != text {
			t.Errorf("%s: error %q, want %q", what, got, text)
		}
	}
	for _, text := range []string{"one", "two"} {
		rewrite(text)
		expect("first read", text)
		expect("kept", text)
	}
	rewrite("three")
	counted.n, counted.after = 0, func(n int) {
		if n == 1 {
			rewrite("four")
		}
	}
	expect("changed in between", "four")
}

// countedReader reads over one connection, whose round trips are counted.
func countedReader(t *testing.T, k *kit) (*view.Reader, *trips) {
	t.Helper()
	config := k.DB.Pool(pg.RoleReadmodel).Config()
	counted := &trips{}
	config.ConnConfig.Tracer, config.MaxConns = counted, 1
	pool, err := pgxpool.NewWithConfig(testkit.Context(t), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	return view.NewReader(pool), counted
}
