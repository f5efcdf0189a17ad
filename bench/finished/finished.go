// Package finished measures the cost of a saga on a database without a history and on one with a history of finished
// workspaces, in turn.
package finished

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/bench"
	"github.com/gpuaas/mesh/bench/rig"
	"github.com/gpuaas/mesh/bench/sagas"
	"github.com/gpuaas/mesh/internal/config"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/mesh/plans"
)

// MostRise is the largest ratio of a saga's cost with a history to its cost without one.
const MostRise = 1.05

// days is the number of days over which the ends of the finished workspaces lie.
const days = 30

// Options describes what to measure.
type Options struct {
	Finished       int           // workspaces; 20,000
	Length         time.Duration // of a stretch; 3 s
	Rounds         int           // pairs of stretches; 8
	Clients        int           // each with one saga at a time; 16
	Agent, Version string
	Out            io.Writer // gets a line for each pair; nil: none
	Logger         *slog.Logger
}

var defaults = Options{
	Finished: 20000, Rounds: 8, Clients: 16, Length: 3 * time.Second,
	Logger: slog.New(slog.DiscardHandler), Out: io.Discard,
}

// cost is what one saga took: milliseconds of processor of the server's sessions and of this process, and bytes of the
// write-ahead log.
type cost struct{ server, own, log float64 }

func (c cost) processor() float64 { return c.server + c.own }

// side is one of the two databases with the replica that runs on it.
type side struct {
	db    *bench.Database
	rig   *rig.Rig
	load  *sagas.Load
	costs []cost
}

// Run runs the bench.
func Run(ctx context.Context, o Options) (bench.Result, error) {
	o = config.Or(o, defaults)
	if o.Finished < 0 || o.Rounds < 1 {
		return bench.Result{}, errors.New("bench of finished workspaces: the counts are too small")
	}
	tmpl, err := plans.Make(ctx, plans.Source{Agent: o.Agent, Version: o.Version, Ended: true, Logger: o.Logger})
	if err != nil {
		return bench.Result{}, err
	}
	return o.compare(ctx, tmpl)
}

// compare measures both sides in turn, and each second pair in the other order.
//
// what is closed may fail
func (o Options) compare(ctx context.Context, tmpl *plans.Template) (_ bench.Result, err error) {
	var sides [2]*side
	defer func() {
		for _, s := range sides {
			err = errors.Join(err, s.close(ctx))
		}
	}()
	for i, ended := range []int{0, o.Finished} {
		began := time.Now()
		if sides[i], err = o.open(ctx, tmpl, ended); err != nil {
			return bench.Result{}, err
		}
		_, err := fmt.Fprintf(o.Out, "a database with %d finished workspaces, made in %.0f s\n",
			ended, time.Since(began).Seconds())
		if err != nil {
			return bench.Result{}, fmt.Errorf("print the load: %w", err)
		}
	}
	for round := range o.Rounds {
		for i := range sides {
			if err := sides[(i+round)%2].stretch(ctx, o); err != nil {
				return bench.Result{}, err
			}
		}
		few, many := sides[0].costs[round], sides[1].costs[round]
		_, err := fmt.Fprintf(o.Out, "processor %.3f and %.3f ms (database %.3f and %.3f), log %.0f and %.0f bytes\n",
			few.processor(), many.processor(), few.server, many.server, few.log, many.log)
		if err != nil {
			return bench.Result{}, fmt.Errorf("print a pair: %w", err)
		}
	}
	return evaluate(o, sides[0], sides[1]), nil
}

// open makes a database and a driver of sagas on it. Full-page images are not written to its log: their number depends
// on checkpoints.
func (o Options) open(ctx context.Context, tmpl *plans.Template, ended int) (*side, error) {
	s := &side{}
	var err error
	if s.db, err = bench.StartDatabaseWithoutPages(ctx, o.Logger); err != nil {
		return s, fmt.Errorf("start the bench's database: %w", err)
	}
	size := plans.Size{Nodes: 1, Workspaces: 1, Ended: ended, Days: days, Events: true}
	if err := tmpl.Load(ctx, s.db.MeshURL(), size); err != nil {
		return s, err
	}
	// The loaded rows are on the disk before anything is measured.
	if err := checkpointed(ctx, s.db); err != nil {
		return s, err
	}
	if s.rig, err = rig.Open(ctx, s.db.URL(pg.RoleOwner), 1); err != nil {
		return s, err
	}
	s.load, err = sagas.Open(ctx, sagas.Options{
		LifecycleURL: s.db.URL(pg.RoleLifecycle), SequencerURL: s.db.URL(pg.RoleSequencer),
		Clients: o.Clients, Workers: o.Clients, Logger: o.Logger,
	})
	return s, err
}

var checkpoint = pg.Define(pg.RoleOwner, "finished.checkpoint", `CHECKPOINT`)

func checkpointed(ctx context.Context, db *bench.Database) error {
	conn, err := pgx.Connect(ctx, db.MeshURL())
	if err != nil {
		return fmt.Errorf("connect to the database: %w", err)
	}
	defer conn.Close(context.WithoutCancel(ctx)) // nothing is kept
	if _, err := pg.Exec(ctx, conn, checkpoint); err != nil {
		return fmt.Errorf("write what was loaded: %w", err)
	}
	return nil
}

func (s *side) close(ctx context.Context) error {
	if s == nil {
		return nil
	}
	if s.load != nil {
		s.load.Close()
	}
	if s.rig != nil {
		s.rig.Close(ctx)
	}
	if s.db != nil {
		return s.db.Close() //nolint:contextcheck // ended though the caller gave up
	}
	return nil
}

// stretch measures one stretch of sagas.
func (s *side) stretch(ctx context.Context, o Options) error {
	units := 0
	own, server, log, err := s.rig.SpendSessions(ctx, func(ctx context.Context) error {
		took, _, err := s.load.Stretch(ctx, o.Clients, o.Length)
		units = len(took)
		return err
	})
	if err != nil {
		return err
	}
	if units == 0 {
		return errors.New("no saga ended in a stretch")
	}
	each := func(spent time.Duration) float64 { return 1000 * spent.Seconds() / float64(units) }
	s.costs = append(s.costs, cost{server: each(server), own: each(own), log: float64(log) / float64(units)})
	return nil
}

// evaluate compares the medians.
func evaluate(o Options, few, many *side) bench.Result {
	details := few.rig.Details
	maps.Copy(details, map[string]any{
		"finished": o.Finished, "clients": o.Clients, "pairs": o.Rounds,
		"baseline": "what a saga costs on a database without a history",
	})
	rise := func(name string, of func(cost) float64) float64 {
		before, after := median(few.costs, of), median(many.costs, of)
		details[name+"_empty"], details[name+"_finished"] = before, after
		details[name+"_ratio"] = after / before
		return after / before
	}
	processor := rise("processor_ms", cost.processor)
	rise("processor_ms_database", func(c cost) float64 { return c.server })
	log := rise("wal_bytes", func(c cost) float64 { return c.log })
	worst := max(processor, log)
	return bench.Result{
		Name: "finished", Value: worst, Unit: "of the processor time or log of a saga, the greater ratio of the two",
		Baseline: 1, Ratio: worst,
		Required: MostRise, Passed: worst <= MostRise, Details: details,
	}
}

// median returns the median of a figure of costs.
func median(costs []cost, of func(cost) float64) float64 {
	list := make([]float64, 0, len(costs))
	for _, c := range costs {
		list = append(list, of(c))
	}
	slices.Sort(list)
	n := len(list)
	return (list[(n-1)/2] + list[n/2]) / 2
}
