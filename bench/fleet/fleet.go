// Package fleet measures the cost of every statement of the product on fleets of three sizes, and how that grows.
//
// The rows are copies of those that a real mesh wrote for one machine and one workspace; see package plans. No service
// runs on the database, so that the bench measures the statement alone, as its role and with a plan that serves all
// arguments.
package fleet

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/gpuaas/mesh/bench"
	"github.com/gpuaas/mesh/internal/config"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/mesh/plans"
)

// MostTime bounds the 99th percentile, in milliseconds, of a statement's time on the largest fleet, unless the
// statement reads the whole fleet. plans.ClassOf returns how the buffers of each statement may grow.
const MostTime = 50.0

// MostBytes is how large the database of a fleet may become.
const MostBytes = 30 << 30

// leastTime is the time in milliseconds below which a statement is not slower on a larger fleet.
const leastTime = 5.0

// grown is how many buffers a statement may touch at any growth: a plan reads all of a small table.
const grown = 200

// Options describes what to measure.
type Options struct {
	Nodes, Workspaces int  // of the largest fleet; 1,000 and 10,000
	Instances         bool // the machines are instances, one for each workspace; there are as many as workspaces
	Calls             int  // of each statement; 20
	History           bool
	// HistoryDays is over how many days workspaces have ended, at the rate of plans.EndedOf; 0: none has. It has events
	// too.
	HistoryDays int
	// Cache is a directory that keeps the databases of fleets for later runs of the same build; empty: they are made
	// anew.
	Cache          string
	Agent, Version string
	Out            io.Writer // gets the table; nil: none
	Logger         *slog.Logger
}

var defaults = Options{
	Nodes: 1000, Workspaces: 10000, Calls: 20, Logger: slog.New(slog.DiscardHandler), Out: io.Discard,
}

// bytesOf returns the bytes of a workspace in the database, with and without its history, each with room for the log of
// the load.
func bytesOf(history bool) uint64 {
	if history {
		return 200 << 10
	}
	return 100 << 10
}

// bytesOfEnded is the size of an ended workspace with its history.
const bytesOfEnded = 350 << 10

// figure is the cost of one statement on one fleet.
type figure struct {
	p50, p99      float64 // milliseconds
	rows, buffers int64
	returned      int64
}

// measured is one statement on all fleets.
type measured struct {
	name      string
	statement *pg.Statement
	class     plans.Class
	of        []figure
	failed    error // why it could not be measured on a fleet
}

// growth returns the exponent by which a figure grew with the fleet. A figure that stays below a floor does not grow.
func growth(few, many, floor, times float64) float64 {
	few, many = max(few, floor), max(many, floor)
	return math.Log(many/few) / math.Log(times)
}

// ofPages returns the exponents by which the time and the buffers of a statement grew. A page that is full on the
// largest fleet, and that the smallest one does not fill, is compared as if it did: the cost of an answer of fixed
// size is not growth. For a sweep the page is the rows that it reads: it is filled by as much more as was read, and by
// no more than a page has more than half of the fleet, for a page is measured from the middle on.
func ofPages(m *measured, smallest plans.Size, times float64) (float64, float64) {
	few, many := m.of[0], m.of[len(m.of)-1]
	fill := 1.0
	if few.returned > 0 && slices.Contains(plans.Bounds(m.statement), many.returned) {
		fill = max(fill, float64(many.returned)/float64(few.returned))
	}
	if plans.Paged(m.statement) && few.rows > 0 {
		fill = max(fill, min(float64(many.rows)/float64(few.rows), 2*plans.PageSize/float64(smallest.Workspaces)))
	}
	return growth(fill*few.p50, many.p50, leastTime, times),
		growth(fill*float64(few.buffers), float64(many.buffers), grown, times)
}

// Run runs the bench.
func Run(ctx context.Context, o Options) (bench.Result, error) {
	o = config.Or(o, defaults)
	if o.Instances {
		o.Nodes = o.Workspaces
	}
	if o.HistoryDays < 0 {
		return bench.Result{}, errors.New("the days of a history are no negative number")
	}
	if o.Nodes < 10 || o.Workspaces < 10*10 {
		return bench.Result{}, errors.New("a fleet of fewer than 10 machines or 100 workspaces shows no growth")
	}
	var sizes []plans.Size
	for _, tenths := range []int{1, 3, 10} {
		workspaces := o.Workspaces * tenths / 10
		sizes = append(sizes, plans.Size{
			Nodes: o.Nodes * tenths / 10, Workspaces: workspaces, Events: o.History || o.HistoryDays > 0,
			Ended: plans.HistoryOf(workspaces, o.HistoryDays), Days: o.HistoryDays, Instances: o.Instances,
		})
	}
	if need := needed(sizes[len(sizes)-1]); need > MostBytes {
		return bench.Result{}, fmt.Errorf("%w: it would take %d bytes, more than %d", ErrNoRoom, need, uint64(MostBytes))
	}
	all := map[string]*measured{}
	var loads []string
	var details map[string]any
	err := o.eachFleet(ctx, sizes, func(ctx context.Context, db *bench.Database, _ plans.Size, load string) error {
		loads = append(loads, load)
		var err error
		details, err = measureAll(ctx, o, db, all)
		return err
	})
	if err != nil {
		return bench.Result{}, err
	}
	details["fleets"] = loads
	if o.HistoryDays > 0 {
		details["history"] = fmt.Sprintf(
			"%d days in each of which %.0f %% of as many workspaces as stand have ended, recreated once: %d",
			o.HistoryDays, 100*plans.EndedOf, sizes[len(sizes)-1].Ended)
	}
	return evaluate(o, all, sizes, details)
}

var sizeOfDatabase = pg.Define(pg.RoleOwner, "bench.size_of_database", `SELECT pg_database_size(current_database())`)

// databaseBytes returns how large the database of the fleet is.
func databaseBytes(ctx context.Context, db *bench.Database) (int64, error) {
	conn, err := pgx.Connect(ctx, db.MeshURL())
	if err != nil {
		return 0, fmt.Errorf("connect to the database: %w", err)
	}
	defer conn.Close(context.WithoutCancel(ctx)) // nothing is kept
	bytes, err := pg.Value[int64](ctx, conn, sizeOfDatabase)
	if err != nil {
		return 0, fmt.Errorf("read the size of the database: %w", err)
	}
	return bytes, nil
}

// measureAll runs each statement on the fleet that is loaded, and returns the environment.
func measureAll(
	ctx context.Context, o Options, db *bench.Database, all map[string]*measured,
) (map[string]any, error) {
	admin, err := pgx.Connect(ctx, db.MeshURL())
	if err != nil {
		return nil, fmt.Errorf("connect to the database: %w", err)
	}
	defer admin.Close(context.WithoutCancel(ctx)) // nothing is kept
	args, err := plans.NewArguments(ctx, admin)
	if err != nil {
		return nil, err
	}
	pools := map[string]*pgxpool.Pool{}
	defer func() {
		for _, p := range pools {
			p.Close()
		}
	}()
	variants := map[string]int{}
	for _, s := range plans.Measured() {
		role := s.Roles()[0]
		if pools[role] == nil {
			if pools[role], err = pg.Open(ctx,
				pg.Config{URL: db.URL(role), ApplicationName: "gpuaas-bench", MaxConns: 1}); err != nil {
				return nil, fmt.Errorf("open the database as %s: %w", role, err)
			}
		}
		variants[s.Name()]++
		key := s.Name()
		if n := variants[s.Name()]; n > 1 {
			key = fmt.Sprintf("%s (%d)", key, n)
		}
		f, err := measure(ctx, o, args, pools[role], s)
		if errors.Is(err, plans.ErrNoPlan) || plans.Refused(s) && refusedValues(err) {
			continue
		}
		if all[key] == nil {
			all[key] = &measured{name: key, statement: s, class: plans.ClassOf(s)}
		}
		if err != nil {
			if ctx.Err() != nil {
				return nil, err
			}
			all[key].failed = err
			continue
		}
		all[key].of = append(all[key].of, f)
	}
	return bench.Environment(ctx, admin)
}

// refusedValues reports whether the database refused the values of a statement, and not the statement or its time.
func refusedValues(err error) bool {
	var refusal *pgconn.PgError
	return errors.As(err, &refusal) && (strings.HasPrefix(refusal.Code, "22") || strings.HasPrefix(refusal.Code, "23") ||
		refusal.Code == "42501" || refusal.Code == "P0001") // insufficient_privilege, raise_exception
}

// leastCalls is how often a statement is called that takes long: what else the disk writes may double the time of one
// call.
const leastCalls = 3

// measure calls one statement as often as asked, or for two seconds but at least leastCalls times.
func measure(ctx context.Context, o Options, args *plans.Arguments, pool *pgxpool.Pool, s *pg.Statement) (figure,
	error,
) {
	conn, err := pool.Acquire(ctx)
	if err != nil {
		return figure{}, fmt.Errorf("take a connection: %w", err)
	}
	literals, err := args.For(ctx, conn.Conn(), s)
	conn.Release()
	if err != nil {
		return figure{}, err
	}
	var f figure
	var took []time.Duration
	for began := time.Now(); len(took) < o.Calls && (len(took) < leastCalls || time.Since(began) < 2*time.Second); {
		cost, err := plans.Explain(ctx, pool, s, literals)
		if err != nil {
			return figure{}, err
		}
		took = append(took, cost.Took)
		f.rows, f.buffers, f.returned = cost.Rows, cost.Buffers, cost.Returned
	}
	f.p50, f.p99 = bench.Percentile(took, 0.5), bench.Percentile(took, 0.99)
	return f, nil
}

// over returns which requirement of its class a statement fails, or the empty string.
func over(m *measured, size plans.Size, inTime, inBuffers float64) string {
	many := m.of[len(m.of)-1]
	most := plans.Most(m.statement, size, many.returned)
	switch {
	case many.p99 > MostTime && !plans.Whole(m.statement):
		return fmt.Sprintf("more than %.0f ms", MostTime)
	case inTime > m.class.InTime:
		return fmt.Sprintf("time grows by more than %.1f", m.class.InTime)
	case inBuffers > m.class.Growth:
		return fmt.Sprintf("buffers grow by more than %.1f", m.class.Growth)
	case many.rows > most:
		return fmt.Sprintf("reads more than %d rows", most)
	}
	return ""
}

// evaluate prints the table, the costliest first, and compares it with the requirements.
func evaluate(o Options, all map[string]*measured, sizes []plans.Size, details map[string]any) (bench.Result, error) {
	var list []*measured
	for _, m := range all {
		if len(m.of) == len(sizes) {
			list = append(list, m)
		}
	}
	last := len(sizes) - 1
	slices.SortFunc(list, func(a, b *measured) int {
		return cmp.Or(cmp.Compare(b.of[last].rows, a.of[last].rows), cmp.Compare(a.name, b.name))
	})
	times := float64(sizes[last].Workspaces) / float64(sizes[0].Workspaces)
	var worst float64
	var wrong []string
	var table strings.Builder
	fmt.Fprintf(&table, "%-44s %9s %9s %9s %9s %9s %6s %6s %s\n", "statement", "p50 ms", "p99 ms", "rows", "returned",
		"buffers", "x time", "x buf", "rows by fleet, class")
	for _, m := range all {
		if len(m.of) < len(sizes) { // it was cut off, or failed, on a larger fleet
			wrong = append(wrong, fmt.Sprintf("%s (not measured at each size: %v)", m.name, m.failed))
		}
	}
	slices.Sort(wrong)
	for _, m := range list {
		many := m.of[last]
		inTime, inBuffers := ofPages(m, sizes[0], times)
		mark, why := m.class.Name, over(m, sizes[last], inTime, inBuffers)
		if why != "" {
			mark += " OVER: " + why
			wrong = append(wrong, m.name)
		}
		if m.class.Reason != "" {
			mark += " (" + m.class.Reason + ")"
		}
		if !plans.Whole(m.statement) {
			worst = max(worst, many.p99)
		}
		fmt.Fprintf(&table, "%-44s %9.2f %9.2f %9d %9d %9d %6.2f %6.2f %d %d %d %s\n", m.name, many.p50, many.p99,
			many.rows, many.returned, many.buffers, inTime, inBuffers, m.of[0].rows, m.of[1].rows, m.of[2].rows, mark)
	}
	if _, err := io.WriteString(o.Out, table.String()); err != nil {
		return bench.Result{}, fmt.Errorf("print the table: %w", err)
	}
	details["statements"], details["over"] = len(list), wrong
	details["baseline"] = "milliseconds that a statement may take at the 99th percentile on the largest fleet, if it " +
		"does not look at the whole fleet"
	return bench.Result{
		Name: "fleet", Value: worst, Unit: "ms, the slowest statement at the 99th percentile", Baseline: MostTime,
		Ratio: worst / MostTime, Required: 1, Passed: len(wrong) == 0, Details: details,
	}, nil
}
