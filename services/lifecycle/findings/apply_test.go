package findings

import (
	"context"
	"errors"
	"strconv"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/findings/finding"
	"github.com/gpuaas/mesh/services/lifecycle/placement"
)

// trips counts the round trips of the contexts that it watches.
type trips struct {
	n        int
	commits  int
	onCommit func(n int) // called before the n-th commit that is a round trip of its own, if it is set
}

type watchedTrips struct{}

func (c *trips) watch(ctx context.Context) context.Context {
	c.n, c.commits = 0, 0
	return context.WithValue(ctx, watchedTrips{}, true)
}

func (c *trips) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	if ctx.Value(watchedTrips{}) == nil {
		return ctx
	}
	c.n++
	if data.SQL == "commit" {
		c.commits++
		if c.onCommit != nil {
			c.onCommit(c.commits)
		}
	}
	return ctx
}

func (*trips) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

func (c *trips) TraceBatchStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceBatchStartData) context.Context {
	if ctx.Value(watchedTrips{}) != nil {
		c.n++
	}
	return ctx
}

func (*trips) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}

func (*trips) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData) {}

// counted has the sweeper use connections whose round trips are counted.
func (b *bed) counted() *trips {
	b.t.Helper()
	counted := &trips{}
	config := b.db.Pool(pg.RoleLifecycle).Config()
	config.ConnConfig.Tracer = counted
	pool, err := pgxpool.NewWithConfig(testkit.Context(b.t), config)
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(pool.Close)
	b.sweeper.deps.DB = pool
	return counted
}

// lostSchemas returns what the detector of schemas sees of a workload database that is empty.
func lostSchemas(many int) []finding.Seen {
	out := make([]finding.Seen, many)
	for i := range out {
		out[i] = finding.Seen{
			Kind: commonv1.FindingKind_FINDING_KIND_CLAIM_WITHOUT_RESOURCE, Severity: finding.P1,
			SubjectType: "claim", SubjectID: ids.New(), WorkspaceID: ids.New(), Summary: "its schema and role are gone",
			NextAction: "look", Certain: true,
			After: map[string]any{"schema": false, "role": false},
		}
	}
	return out
}

// TestAScanIsAppliedInFewRoundTrips applies thousands of findings: as they are opened, seen again with and without an
// event, and resolved. What did not change is not written.
func TestAScanIsAppliedInFewRoundTrips(t *testing.T) {
	b := newBed(t, Config{})
	counted := b.counted()
	const many = 5000
	seen, batches := lostSchemas(many), many/applyBatch
	rows := func() string {
		return b.text(`SELECT coalesce(md5(string_agg(f.ctid::text, ' ' ORDER BY f.finding_id)), '')
			FROM lifecycle.finding f`)
	}
	events := func() int {
		n, _ := strconv.Atoi(b.text(`SELECT count(*)::text FROM events.event WHERE kind = 'finding.changed'`))
		return n
	}
	for _, step := range []struct {
		what   string
		seen   []finding.Seen
		trips  int // of each transaction
		want   Swept
		events int
	}{
		{"opened", seen, 3, Swept{Opened: many, Open: many}, many},
		{"seen twice", seen, 3, Swept{Open: many}, 2 * many},
		{"seen for the third time", seen, 2, Swept{Open: many}, 2 * many},
		{"one changed", seen, 2, Swept{Open: many}, 3*many + 1},
		{"resolved", nil, 5, Swept{Resolved: many}, 4*many + 1},
	} {
		if step.what == "one changed" {
			b.appliesScan("schemas", seen...) // for the fourth time: an event of each
			seen[7].Summary = "its role is gone"
		}
		before := rows()
		var got Swept
		if err := b.sweeper.applyScan(counted.watch(t.Context()), "schemas", step.seen, &got); err != nil {
			t.Fatalf("%s: %v", step.what, err)
		}
		if most := step.trips*batches + 2; counted.n > most {
			t.Errorf("%s: %d round trips, want at most %d", step.what, counted.n, most)
		}
		if got != step.want {
			t.Errorf("%s: %+v, want %+v", step.what, got, step.want)
		}
		if n := events(); n != step.events {
			t.Errorf("%s: %d events, want %d", step.what, n, step.events)
		}
		if now := rows(); step.what == "seen for the third time" && now != before {
			t.Error("rows that did not change were written")
		}
	}
	if counts := b.text(`SELECT string_agg(DISTINCT f.count::text || ' ' || (f.last_seen_at > f.first_seen_at)::text, ', ')
		FROM lifecycle.finding f WHERE f.resolved_at IS NOT NULL`); counts != "5 true" {
		t.Errorf("scans that saw them, and whether the last was after the first: %s", counts)
	}
	if n := b.text(`SELECT count(*)::text FROM lifecycle.suspicion`); n != "0" {
		t.Errorf("%s suspicions are left", n)
	}
}

// TestTwoInstancesAreFoundBetweenBatches: the sweep for two instances of a workspace waits for one transaction of
// another sweep that has thousands of findings to write, and not for all of them.
func TestTwoInstancesAreFoundBetweenBatches(t *testing.T) {
	b := newBed(t, Config{})
	counted := b.counted()
	stranger := ids.New()
	for _, epoch := range []int64{1, 2} {
		if _, err := b.world.Launch(t.Context(), placement.LaunchRequest{
			WorkspaceID: stranger, Epoch: epoch, InstanceID: ids.New(),
		}); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := b.sweeper.SweepTwoInstances(t.Context()); err != nil {
		t.Fatal(err)
	}
	b.pass(2 * b.sweeper.cfg.Grace)
	seen := lostSchemas(3 * applyBatch)
	b.appliesScan("schemas", seen...)
	b.appliesScan("schemas", seen...)
	swept, open := make(chan error, 1), ""
	counted.onCommit = func(n int) {
		switch n {
		case 1:
			go func() {
				_, err := b.sweeper.SweepTwoInstances(t.Context())
				swept <- err
			}()
			testkit.Eventually(t, testkit.Patience, func() error {
				if b.text(`SELECT count(*)::text FROM pg_locks l JOIN pg_database d ON d.oid = l.database
					WHERE d.datname = current_database() AND l.locktype = 'advisory' AND NOT l.granted`) == "0" {
					return errors.New("the sweep for two instances does not wait for its turn")
				}
				return nil
			})
		case 2:
			open = b.text(`SELECT coalesce(string_agg(f.subject_id, ' '), '') FROM lifecycle.finding f
				WHERE f.resolved_at IS NULL AND f.severity = 'p0'`)
		}
	}
	var got Swept
	if err := b.sweeper.applyScan(counted.watch(t.Context()), "schemas", seen, &got); err != nil {
		t.Fatal(err)
	}
	if counted.commits > 0 { // the sweep began with the first one
		if err := <-swept; err != nil {
			t.Fatal(err)
		}
	}
	if open != stranger || counted.commits != 3 {
		t.Errorf("after the first of %d transactions %q has two instances, want %s after the first of 3", counted.commits,
			open, stranger)
	}
}
