// Package retentiontest proves that the cuts of a service follow their policy keys.
package retentiontest

import (
	"context"
	"maps"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/internal/policy/policystore"
	"github.com/gpuaas/mesh/internal/retention"
	"github.com/gpuaas/mesh/internal/testkit"
)

// tracer keeps the term that each cut's statement was given.
type tracer struct {
	cuts map[string]string // by the text of the statement

	mu    sync.Mutex
	terms map[string]time.Duration
}

// TraceQueryStart implements pgx.QueryTracer.
func (tr *tracer) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	if name, ok := tr.cuts[data.SQL]; ok {
		seconds, _ := data.Args[0].(float64)
		tr.mu.Lock()
		defer tr.mu.Unlock()
		tr.terms[name] = time.Duration(seconds) * time.Second
	}
	return ctx
}

// TraceQueryEnd implements pgx.QueryTracer.
func (tr *tracer) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// TermsFollow changes each key in the database and walks over the cuts as the service does. It fails the test unless
// the statements of the cuts that the key is said to govern are given its value as their term, and all others the
// defaults. The keys govern all cuts between them.
func TermsFollow(t *testing.T, role string, cuts []retention.Cut, governed map[string][]string) {
	t.Helper()
	testkit.IO(t)
	db := testkit.DB(t)
	tr := &tracer{cuts: map[string]string{}}
	byDefault := map[string]time.Duration{}
	for _, c := range cuts {
		tr.cuts[c.Statement.SQL()] = c.Name
	}
	for key, names := range governed {
		for _, name := range names {
			byDefault[name] = policy.Defaults().Duration(key)
		}
	}
	cfg, err := pgxpool.ParseConfig(db.URL(role))
	if err != nil {
		t.Fatal(err)
	}
	cfg.ConnConfig.Tracer = tr
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	source := policy.NewSource(policystore.Load(pool), testkit.Logger(t), policy.SourceConfig{Timeout: time.Minute})
	walker, err := retention.New(retention.Deps{Logger: testkit.Logger(t), DB: pool, Policy: source}, cuts...)
	if err != nil {
		t.Fatal(err)
	}
	const more = 4000 * time.Second // a term that is longer than the default is above every floor
	walk := func(when string, want map[string]time.Duration) {
		t.Helper()
		tr.terms = map[string]time.Duration{}
		if err := source.Refresh(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := walker.Walk(t.Context()); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, tr.terms); diff != "" {
			t.Errorf("%s: the terms of the cuts (-want +got):\n%s", when, diff)
		}
	}
	walk("by default", byDefault)
	put := func(key, value string) {
		t.Helper()
		if err := policystore.Put(t.Context(), db.Pool(pg.RoleRecovery), key, value, "test", "test"); err != nil {
			t.Fatal(err)
		}
	}
	for _, key := range slices.Sorted(maps.Keys(governed)) {
		changed := policy.Defaults().Duration(key) + more
		put(key, strconv.Itoa(int(changed.Seconds())))
		want := maps.Clone(byDefault)
		for _, name := range governed[key] {
			want[name] = changed
		}
		walk(key, want)
		value, _ := policy.Defaults().Get(key)
		put(key, value)
	}
}
