// Package schemas measures the cost of one more workspace's schema and role in a workload database that has many.
package schemas

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/gpuaas/mesh/bench"
	"github.com/gpuaas/mesh/bench/rig"
	"github.com/gpuaas/mesh/internal/config"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/schema"
)

// MostGrowth is the exponent by which the processor time of one call may grow with the number of schemas.
const MostGrowth = 0.2

// floor is the processor time of a call, in milliseconds, below which it does not grow.
const floor = 2

// fillers is how many clients fill the database.
const fillers = 4

// Options describes what to measure.
type Options struct {
	// Schemas is the number of schemas of the largest database; default 10,000. It is measured at a hundredth, a tenth and
	// all of them, and at 10 at least.
	Schemas  int
	Calls    int // of each kind; 20
	Database *bench.Database
	Out      io.Writer // gets the table; nil: none
}

// figure is the cost of one call: milliseconds on the clock and of the server's processor, and bytes of its log.
type figure struct{ p50, p99, processor, log float64 }

// tester is a database that is filled.
type tester struct {
	o        Options
	db       *pgxpool.Pool // as the administrator of workloads
	rig      *rig.Rig
	verifier string
	made     int
	ids      map[string]string // of the workspaces of schemas that are made and dropped
}

// password is the password of all roles of the bench.
const password = "bench"

// calls are the measured calls, in their order.
var calls = []struct {
	name string
	run  func(ctx context.Context, t *tester, name string) error
}{
	{"create", func(ctx context.Context, t *tester, name string) error {
		t.ids[name] = ids.New()
		return schema.MakeSchema(ctx, t.db, name, t.verifier, t.ids[name])
	}},
	{"login", login},
	{"read all names", readNames},
	{"drop", func(ctx context.Context, t *tester, name string) error {
		return schema.DropSchema(ctx, t.db, name, t.ids[name])
	}},
}

// grows reports whether a call works on one schema alone, so that its growth is limited.
func grows(call string) bool { return call != "read all names" }

var (
	allNames = pg.Define(pg.RoleWorkloadAdmin, "schemas.all_names", `
		SELECT count(*) FROM pg_namespace n JOIN pg_roles r ON r.rolname = n.nspname WHERE starts_with(n.nspname, 't_')`)
	ownTables = pg.DefineUnprepared(pg.RoleWorkloadAdmin, "schemas.own_tables",
		"the role of one workspace runs it", func(struct{}) string {
			return `SELECT count(*) FROM workspace_info`
		})
	sizes = pg.Define(pg.RoleWorkloadAdmin, "schemas.sizes", `
		SELECT pg_database_size(current_database()) AS bytes,
			(SELECT count(*) FROM pg_namespace WHERE starts_with(nspname, 't_')) AS schemas,
			(SELECT pg_column_size(datacl) FROM pg_database WHERE datname = current_database()) AS grants`)
)

// size is the size of the database.
type size struct {
	Bytes   int64 `db:"bytes"`
	Schemas int64 `db:"schemas"`
	Grants  *int  `db:"grants"` // bytes of the grants on the database
}

// Run runs the bench.
func Run(ctx context.Context, o Options) (bench.Result, error) {
	o = config.Or(o, Options{Schemas: 10_000, Calls: 20, Out: io.Discard})
	if o.Schemas < 100 {
		return bench.Result{}, errors.New("fewer than 100 schemas show no growth")
	}
	t := &tester{o: o, verifier: schema.SchemaVerifier(password), ids: map[string]string{}}
	var err error
	if t.db, err = pg.Open(ctx, pg.Config{
		URL: o.Database.WorkloadsURL(pg.RoleWorkloadAdmin), ApplicationName: "gpuaas-bench", MaxConns: fillers,
	}); err != nil {
		return bench.Result{}, fmt.Errorf("open the workload database: %w", err)
	}
	defer t.db.Close()
	if t.rig, err = rig.Open(ctx, o.Database.URL(pg.RoleOwner), 1); err != nil {
		return bench.Result{}, err
	}
	defer t.rig.Close(ctx)
	counts := []int{max(o.Schemas/100, 10), max(o.Schemas/10, 10), o.Schemas}
	figures := map[string][]figure{}
	for _, n := range counts {
		if err := t.size(ctx, n, figures); err != nil {
			return bench.Result{}, err
		}
	}
	return t.evaluate(counts, figures), nil
}

// size fills the database up to a number of schemas and measures each call.
func (t *tester) size(ctx context.Context, n int, figures map[string][]figure) error {
	began, from := time.Now(), t.made
	if err := t.fill(ctx, n); err != nil {
		return err
	}
	took := time.Since(began)
	var names []string
	for i := range t.o.Calls {
		names = append(names, fmt.Sprintf("t_probe_%06d_%d", n, i))
	}
	at, err := pg.One[size](ctx, t.db, sizes)
	if err != nil {
		return fmt.Errorf("read the sizes of the workload database: %w", err)
	}
	grants := 0
	if at.Grants != nil {
		grants = *at.Grants
	}
	if _, err := fmt.Fprintf(t.o.Out,
		"%d schemas, the last %d made in %.0f s by %d clients: %.0f MB, %d bytes of grants on the database\n",
		at.Schemas, n-from, took.Seconds(), fillers, float64(at.Bytes)/1e6, grants); err != nil {
		return fmt.Errorf("print the size: %w", err)
	}
	for _, call := range calls {
		f, err := t.measure(ctx, names, call.run)
		if err != nil {
			return fmt.Errorf("%s at %d schemas: %w", call.name, n, err)
		}
		figures[call.name] = append(figures[call.name], f)
		if _, err := fmt.Fprintf(t.o.Out,
			"  %-16s p50 %8.2f ms, p99 %8.2f ms, processor of the server %8.2f ms, log %8.0f bytes\n",
			call.name, f.p50, f.p99, f.processor, f.log); err != nil {
			return fmt.Errorf("print a call: %w", err)
		}
	}
	return nil
}

// fill makes schemas until there are n.
func (t *tester) fill(ctx context.Context, n int) error {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(fillers)
	for ; t.made < n && ctx.Err() == nil; t.made++ {
		name := fmt.Sprintf("t_bench_%08d", t.made)
		group.Go(func() error { return schema.MakeSchema(ctx, t.db, name, t.verifier, ids.New()) })
	}
	if err := group.Wait(); err != nil {
		return fmt.Errorf("fill the workload database: %w", err)
	}
	return nil
}

// measure makes one call for each name.
func (t *tester) measure(
	ctx context.Context, names []string, run func(context.Context, *tester, string) error,
) (figure, error) {
	log, _, err := t.rig.Written(ctx)
	if err != nil {
		return figure{}, err
	}
	server := rig.ServerTime(t.o.Database.PID())
	var took []time.Duration
	for _, name := range names {
		began := time.Now()
		if err := run(ctx, t, name); err != nil {
			return figure{}, err
		}
		took = append(took, time.Since(began))
	}
	server = rig.ServerTime(t.o.Database.PID()) - server
	after, _, err := t.rig.Written(ctx)
	if err != nil {
		return figure{}, err
	}
	each := float64(len(names))
	return figure{
		p50: bench.Percentile(took, .5), p99: bench.Percentile(took, .99),
		processor: 1000 * server.Seconds() / each, log: float64(after-log) / each,
	}, nil
}

// login opens a session of a workspace's role and reads from its schema.
func login(ctx context.Context, t *tester, name string) error {
	conn, err := pgx.Connect(ctx, t.o.Database.WorkloadsURLOf(name, password))
	if err != nil {
		return fmt.Errorf("log in: %w", err)
	}
	defer conn.Close(context.WithoutCancel(ctx)) // nothing is kept
	if _, err := pg.Value[int64](ctx, conn, ownTables.For(struct{}{})); err != nil {
		return fmt.Errorf("read a table of the schema: %w", err)
	}
	return nil
}

// readNames reads the names of all schemas that have a role, as the sweep of findings does.
func readNames(ctx context.Context, t *tester, _ string) error {
	if _, err := pg.Value[int64](ctx, t.db, allNames); err != nil {
		return fmt.Errorf("read the names of schemas: %w", err)
	}
	return nil
}

// evaluate compares how processor time grew.
func (t *tester) evaluate(counts []int, figures map[string][]figure) bench.Result {
	details, worst := t.rig.Details, math.Inf(-1)
	last := len(counts) - 1
	times := math.Log(float64(counts[last]) / float64(counts[0]))
	var over []string
	for _, call := range calls {
		list := figures[call.name]
		growth := math.Log(max(list[last].processor, floor)/max(list[0].processor, floor)) / times
		details["exponent_"+call.name] = math.Round(100*growth) / 100
		if !grows(call.name) {
			continue
		}
		worst = max(worst, growth)
		if growth > MostGrowth {
			over = append(over, call.name)
		}
	}
	slices.Sort(over)
	details["schemas"], details["over"] = counts, over
	details["baseline"] = "exponent by which the server's processor time of a call may grow with the number of schemas"
	return bench.Result{
		Name: "schemas", Value: worst, Unit: "the greatest exponent of a call over the number of schemas",
		Baseline: MostGrowth, Ratio: worst / MostGrowth,
		Required: 1, Passed: len(over) == 0, Details: details,
	}
}
