package retention_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
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

func TestMain(m *testing.M) { testkit.Main(m) }

// batches are five, and cut nothing.
var batches = pg.Define(pg.RoleLifecycle, "retentiontest.batches", `
	SELECT 0::bigint AS cut, CASE WHEN $1::float8 >= 0 AND $3::integer > 0 AND right($2, 1) < '4'
		THEN '00000000-0000-0000-0000-00000000000' || (right($2, 1)::integer + 1) END AS next`)

// tracer notes after which id each batch begins, and calls do before it.
type tracer struct {
	began []string
	do    func(after string) context.Context
}

func (tr *tracer) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	if data.SQL != batches.SQL() {
		return ctx
	}
	after, _ := data.Args[1].(string)
	tr.began = append(tr.began, after[len(after)-1:])
	if replaced := tr.do(after); replaced != nil {
		return replaced
	}
	return ctx
}

func (tr *tracer) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// walker returns the walker of one replica.
func walker(t *testing.T, db *testkit.Database, tr *tracer, names ...string) *retention.Walker {
	t.Helper()
	if len(names) == 0 {
		names = []string{"tests"}
	}
	cfg, err := pgxpool.ParseConfig(db.URL(pg.RoleLifecycle))
	if err != nil {
		t.Fatal(err)
	}
	cfg.ConnConfig.Tracer = tr
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	source := policy.NewSource(policystore.Load(pool), testkit.Logger(t), policy.SourceConfig{})
	var cuts []retention.Cut
	for _, name := range names {
		cuts = append(cuts, retention.Cut{Name: name, Key: policy.RetentionTasksSeconds, Statement: batches})
	}
	w, err := retention.New(retention.Deps{Logger: testkit.Logger(t), DB: pool, Policy: source}, cuts...)
	if err != nil {
		t.Fatal(err)
	}
	return w
}

// A walk that takes longer than its time is continued where it was stopped, on another replica too, so that the last
// rows have their turn. The walk after that begins anew.
func TestAWalkThatWasStoppedGoesOn(t *testing.T) {
	testkit.IO(t)
	db := testkit.DB(t)
	var all [][]string
	for _, last := range []string{"2", "3", "", ""} {
		ctx, stop := context.WithCancel(testkit.Context(t))
		tr := &tracer{do: func(after string) context.Context {
			if after[len(after)-1:] == last {
				stop()
			}
			return nil
		}}
		err := walker(t, db, tr).Walk(ctx)
		if stopped := errors.Is(err, context.Canceled); stopped != (last != "") {
			t.Fatalf("a walk to %q ended with %v", last, err)
		}
		stop()
		all = append(all, slices.Clone(tr.began))
	}
	want := [][]string{{"0", "1", "2"}, {"2", "3"}, {"3", "4"}, {"0", "1", "2", "3", "4"}}
	if diff := cmp.Diff(want, all); diff != "" {
		t.Errorf("the batches of four walks (-want +got):\n%s", diff)
	}
}

// A walk that failed begins anew, so that rows before the place of the failure are cut.
func TestAWalkThatFailedBeginsAnew(t *testing.T) {
	testkit.IO(t)
	db := testkit.DB(t)
	var all [][]string
	for _, last := range []string{"2", ""} {
		tr := &tracer{do: func(after string) context.Context {
			if after[len(after)-1:] != last {
				return nil
			}
			ctx, cancel := context.WithCancelCause(t.Context())
			cancel(fmt.Errorf("a failure of the database at %s", after))
			return ctx
		}}
		if err := walker(t, db, tr).Walk(testkit.Context(t)); (err != nil) != (last != "") {
			t.Fatalf("a walk to %q ended with %v", last, err)
		}
		all = append(all, slices.Clone(tr.began))
	}
	if diff := cmp.Diff([][]string{{"0", "1", "2"}, {"0", "1", "2", "3", "4"}}, all); diff != "" {
		t.Errorf("the batches of two walks (-want +got):\n%s", diff)
	}
}

// A cut is late by the interval that its service is configured with: one that walks every six hours is not late after
// one.
func TestLatenessFollowsTheInterval(t *testing.T) {
	testkit.IO(t)
	for _, c := range []struct {
		every, lag time.Duration
		late       bool
	}{
		{10 * time.Minute, 59 * time.Minute, false},
		{10 * time.Minute, 61 * time.Minute, true},
		{6 * time.Hour, 17 * time.Hour, false},
		{6 * time.Hour, 19 * time.Hour, true},
		{0, 61 * time.Minute, true}, // of a build that does not record it
	} {
		t.Run(fmt.Sprintf("every %s, %s ago", c.every, c.lag), func(t *testing.T) {
			db := testkit.DB(t)
			w := walker(t, db, &tracer{do: func(string) context.Context { return nil }})
			w.Job(c.every)
			if err := w.Walk(testkit.Context(t)); err != nil {
				t.Fatal(err)
			}
			testkit.SetClockOffset(db, c.lag)
			accounts, err := retention.Accounts(testkit.Context(t), db.Pool(pg.RoleReadmodel))
			if err != nil || len(accounts) != 1 {
				t.Fatalf("accounts %v, %v", accounts, err)
			}
			if a := accounts[0]; a.Late() != c.late {
				t.Errorf("late: %t, with a lag of %s where %s is late", a.Late(), a.Lag, a.LateAfter())
			}
		})
	}
}

// A cut that has never completed is late too, by its first walk.
func TestACutThatNeverEndsIsLate(t *testing.T) {
	testkit.IO(t)
	db := testkit.DB(t)
	fails := elsewhere(t, db, "tests", func() (int64, error) { return 0, errors.New("no database") })
	for _, c := range []struct {
		offset time.Duration
		late   bool
	}{{0, false}, {30 * time.Minute, false}, {61 * time.Minute, true}} {
		testkit.SetClockOffset(db, c.offset)
		if err := fails.Walk(testkit.Context(t)); err == nil {
			t.Fatal("a walk that fails ended well")
		}
		accounts, err := retention.Accounts(testkit.Context(t), db.Pool(pg.RoleReadmodel))
		if err != nil || len(accounts) != 1 {
			t.Fatalf("accounts %v, %v", accounts, err)
		}
		if a := accounts[0]; a.Late() != c.late {
			t.Errorf("after %s late: %t, with a lag of %s where %s is late", c.offset, a.Late(), a.Lag, a.LateAfter())
		}
	}
}

// elsewhere is a walker of one cut in another database.
func elsewhere(t *testing.T, db *testkit.Database, name string, cut func() (int64, error)) *retention.Walker {
	t.Helper()
	pool := db.Pool(pg.RoleLifecycle)
	w, err := retention.New(retention.Deps{
		Logger: testkit.Logger(t), DB: pool,
		Policy: policy.NewSource(policystore.Load(pool), testkit.Logger(t), policy.SourceConfig{}),
	}, retention.Cut{
		Name: name, Key: policy.RetentionTasksSeconds,
		Elsewhere: func(context.Context, time.Time, int) (int64, error) { return cut() },
	})
	if err != nil {
		t.Fatal(err)
	}
	return w
}

// A cut in another database stops with rollback mode, also in the middle of a walk.
func TestACutElsewhereStopsWithRollbackMode(t *testing.T) {
	testkit.IO(t)
	db := testkit.DB(t)
	batches := 0
	w := elsewhere(t, db, "tests", func() (int64, error) {
		batches++
		if batches == 2 {
			testkit.SetRollback(db, true)
		}
		return int64(500 * max(0, min(1, 4-batches))), nil
	})
	if err := w.Walk(testkit.Context(t)); err != nil {
		t.Fatal(err)
	}
	if batches != 2 {
		t.Errorf("%d batches, of which the second began rollback mode", batches)
	}
}

// The account of a cut that has deleted rows is not dropped silently: it is late for thirty days, as that of a replica
// that lacks its configuration.
func TestACutThatCutIsForgottenLate(t *testing.T) {
	testkit.IO(t)
	db := testkit.DB(t)
	some := int64(7)
	if err := elsewhere(t, db, "once", func() (int64, error) { return some, nil }).Walk(testkit.Context(t)); err != nil {
		t.Fatal(err)
	}
	none := &tracer{do: func(string) context.Context { return nil }}
	for _, c := range []struct {
		offset time.Duration
		want   []string
	}{
		{25 * time.Hour, []string{"here false", "once true"}},
		{29 * 24 * time.Hour, []string{"here false", "once true"}},
		{31 * 24 * time.Hour, []string{"here false"}},
	} {
		testkit.SetClockOffset(db, c.offset)
		if err := walker(t, db, none, "here").Walk(testkit.Context(t)); err != nil {
			t.Fatal(err)
		}
		accounts, err := retention.Accounts(testkit.Context(t), db.Pool(pg.RoleReadmodel))
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, a := range accounts {
			got = append(got, fmt.Sprintf("%s %t", a.Cut, a.Late()))
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("after %s accounts %q, want %q", c.offset, got, c.want)
		}
	}
}

// A cut that a service does not have now, such as one of a database that has left the configuration, is not late for
// ever.
func TestACutThatIsNoMoreIsForgotten(t *testing.T) {
	testkit.IO(t)
	db := testkit.DB(t)
	none := &tracer{do: func(string) context.Context { return nil }}
	names := func() []string {
		accounts, err := retention.Accounts(testkit.Context(t), db.Pool(pg.RoleReadmodel))
		if err != nil {
			t.Fatal(err)
		}
		var out []string
		for _, a := range accounts {
			out = append(out, a.Cut)
		}
		return out
	}
	walk := func(cuts ...string) {
		if err := walker(t, db, none, cuts...).Walk(testkit.Context(t)); err != nil {
			t.Fatal(err)
		}
	}
	walk("here", "once")
	walk("here") // of another build during an update, perhaps
	if got := names(); !slices.Equal(got, []string{"here", "once"}) {
		t.Errorf("accounts of %q", got)
	}
	testkit.SetClockOffset(db, 25*time.Hour)
	walk("here")
	if got := names(); !slices.Equal(got, []string{"here"}) {
		t.Errorf("a day later accounts of %q", got)
	}
}
