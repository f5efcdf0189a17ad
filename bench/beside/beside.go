// Package beside measures our sagas beside the workflows of DBOS Transact, and our tasks beside the jobs of River, on
// the same Postgres in the same minutes.
//
// The other engines run in a program of a module of its own, bench/peers, each in a process and a database of its own;
// the protocol is package peer. Contenders are measured in turn. Rates are medians of the rounds. The cost of a unit
// counts the whole database server, the contender's processes, and for ours the numbering and the projection of its
// events, which the bench awaits after each stretch.
package beside

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/gpuaas/mesh/bench"
	"github.com/gpuaas/mesh/bench/beside/peer"
	"github.com/gpuaas/mesh/bench/process"
	"github.com/gpuaas/mesh/bench/rig"
	"github.com/gpuaas/mesh/bench/sagas"
	"github.com/gpuaas/mesh/bench/tasks"
	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/config"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/readmodel/project"
)

// RequiredSagas and RequiredTasks are the least ratios of our median rate to the best median of the other engine.
const (
	RequiredSagas = 1.1
	RequiredTasks = 0.9
)

// Options describes the engines and the load of a comparison.
type Options struct {
	Database *bench.Database
	Command  process.Command // makes a child of this binary
	Peers    process.Command // makes a child of the program of the other engines
	Logger   *slog.Logger
	Length   time.Duration // of each stretch; default 5 s
	Rounds   int           // default 3
	Agents   int           // of our tasks; default 200
	Clients  []int         // runs and workflows at once; default 16 and 64, and the last is compared
}

var defaults = Options{
	Length: 5 * time.Second, Rounds: 3, Agents: 200, Clients: []int{16, 64}, Logger: slog.New(slog.DiscardHandler),
}

func (o Options) validate() error {
	if o.Database == nil || o.Command == nil || o.Peers == nil || len(o.Clients) == 0 {
		return errors.New("bench peers: no database, no command or no clients")
	}
	return nil
}

// Sagas measures runs of six steps that do nothing beside DBOS's workflows of six steps that do nothing, as many at
// once.
func Sagas(ctx context.Context, opts Options) (bench.Result, error) {
	opts = config.Or(opts, defaults)
	s, err := open(ctx, opts)
	if err != nil {
		return bench.Result{}, err
	}
	defer s.close(ctx)
	most := slices.Max(opts.Clients)
	load, err := sagas.Open(ctx, sagas.Options{
		Clients: most, Workers: most,
		LifecycleURL: opts.Database.URL(pg.RoleLifecycle), SequencerURL: opts.Database.URL(pg.RoleSequencer),
		Logger: opts.Logger,
	})
	if err != nil {
		return bench.Result{}, fmt.Errorf("open sagas: %w", err)
	}
	defer load.Close()
	dbos, err := s.peer(ctx, "dbos", peer.Setup{Database: "dbos"})
	if err != nil {
		return bench.Result{}, err
	}
	var all []*contender
	for _, clients := range opts.Clients {
		all = append(all, s.ours(fmt.Sprintf("ours, %d at once", clients),
			func(ctx context.Context, length time.Duration) ([]time.Duration, time.Duration, error) {
				return load.Stretch(ctx, clients, length)
			}, nil), dbos.under(fmt.Sprintf("%s, %d at once", dbos.name, clients), peer.Load{Clients: clients}))
	}
	if err := s.measure(ctx, all); err != nil {
		return bench.Result{}, err
	}
	return s.result("sagas beside DBOS", "runs/s", all, all[len(all)-2], RequiredSagas, all[len(all)-1]), nil
}

// Tasks measures round trips of our tasks over agents beside River's jobs that do nothing, each inserted by a commit of
// its own.
func Tasks(ctx context.Context, opts Options) (bench.Result, error) {
	opts = config.Or(opts, defaults)
	s, err := open(ctx, opts)
	if err != nil {
		return bench.Result{}, err
	}
	defer s.close(ctx)
	load, err := tasks.Open(ctx, tasks.Options{
		Agents: opts.Agents, Database: opts.Database, Command: opts.Command,
		Logger: opts.Logger,
	})
	if err != nil {
		return bench.Result{}, fmt.Errorf("open tasks: %w", err)
	}
	defer load.Close()
	all := []*contender{s.ours("ours", load.Stretch, []int{load.Agents()})}
	all[0].settings = map[string]any{
		"agents": opts.Agents, "outstanding": opts.Agents * outstanding,
		"connections": rig.RateClients,
	}
	for _, setup := range []peer.Setup{
		{Database: "river_default", Workers: 500},
		{Database: "river_tuned", Workers: 100, Cooldown: time.Millisecond},
	} {
		river, err := s.peer(ctx, "river", setup)
		if err != nil {
			return bench.Result{}, err
		}
		name := river.name + ", defaults, 500 workers"
		if setup.Cooldown > 0 {
			name = river.name + ", tuned, 100 workers"
		}
		all = append(all, river.under(name, peer.Load{Clients: rig.RateClients, Outstanding: opts.Agents * outstanding}))
	}
	if err := s.measure(ctx, all); err != nil {
		return bench.Result{}, err
	}
	return s.result("tasks beside River", "round trips/s", all, all[0], RequiredTasks, all[1:]...), nil
}

// outstanding is how many tasks of a node wait at once, as in bench tasks.
const outstanding = 16

// session is a comparison under way.
type session struct {
	opts      Options
	meter     meter
	pool      *pgxpool.Pool // of the projector
	projector *project.Projector
	children  []*process.Child
}

func open(ctx context.Context, opts Options) (*session, error) {
	if err := opts.validate(); err != nil {
		return nil, err
	}
	s := &session{opts: opts}
	base, err := rig.Open(ctx, opts.Database.URL(pg.RoleOwner), 2)
	if err != nil {
		return nil, err
	}
	s.meter = meter{rig: base, postmaster: opts.Database.PID()}
	if s.pool, err = pg.Open(ctx, pg.Config{
		URL: opts.Database.URL(pg.RoleReadmodel), ApplicationName: "bench projector",
		MaxConns: 3,
	}); err == nil {
		s.projector, err = project.New(project.Deps{
			Logger: opts.Logger, DB: s.pool, Numbered: &events.Signal{},
			Wake: &events.Signal{},
		})
	}
	if err != nil {
		s.close(ctx)
		return nil, fmt.Errorf("open projector: %w", err)
	}
	return s, nil
}

func (s *session) close(ctx context.Context) {
	for _, c := range s.children {
		c.Stop()
	}
	if s.pool != nil {
		s.pool.Close()
	}
	s.meter.rig.Close(ctx)
}

// caughtUp returns when all events are numbered and projected.
func (s *session) caughtUp(ctx context.Context) error {
	for {
		if err := s.projector.Drain(ctx); err != nil {
			return fmt.Errorf("project: %w", err)
		}
		lag, err := s.projector.Lag(ctx)
		if err != nil {
			return fmt.Errorf("read lag: %w", err)
		}
		if lag.Parked > 0 {
			return fmt.Errorf("%d events could not be projected", lag.Parked)
		}
		if lag.Events == 0 && lag.Unnumbered == 0 {
			return nil
		}
		if !app.Sleep(ctx, 5*time.Millisecond) {
			return fmt.Errorf("wait for the projection: %w", context.Cause(ctx))
		}
	}
}

// ours makes a contender of a load in this process.
func (s *session) ours(name string,
	stretch func(context.Context, time.Duration) ([]time.Duration, time.Duration, error), processes []int,
) *contender {
	return &contender{
		name: name, own: true, processes: processes, catchUp: s.caughtUp,
		stretch: func(ctx context.Context, length time.Duration) (peer.Stretch, error) {
			took, elapsed, err := stretch(ctx, length)
			return peer.Stretch{
				Units: len(took), Took: elapsed, P50: bench.Percentile(took, .5),
				P99: bench.Percentile(took, .99),
			}, err
		},
	}
}

// running is another engine in its process.
type running struct {
	name  string // with its version
	child *process.Child
	said  map[string]any
}

// peer starts another engine in a database of its own.
func (s *session) peer(ctx context.Context, engine string, setup peer.Setup) (*running, error) {
	setup.AdminURL = s.opts.Database.AdminURL()
	child, err := process.Start(s.opts.Peers, engine)
	if err != nil {
		return nil, fmt.Errorf("start the program of other engines: %w; `make peers` builds it", err)
	}
	s.children = append(s.children, child)
	var described peer.Described
	if err := child.Ask(ctx, time.Minute, "start", setup, &described); err != nil {
		return nil, fmt.Errorf("start %s: %w", engine, err)
	}
	r := &running{name: engine + " " + described.Version, child: child, said: described.Settings}
	// Statements prepared, pools filled.
	_, err = r.stretch(ctx, peer.Load{Length: time.Second, Clients: rig.RateClients})
	return r, err
}

func (r *running) stretch(ctx context.Context, load peer.Load) (peer.Stretch, error) {
	var s peer.Stretch
	err := r.child.Ask(ctx, load.Length+2*time.Minute, "stretch", load, &s)
	return s, err
}

// under makes a contender of an engine and a load.
func (r *running) under(name string, load peer.Load) *contender {
	return &contender{
		name: name, processes: []int{r.child.PID()}, settings: r.said,
		stretch: func(ctx context.Context, length time.Duration) (peer.Stretch, error) {
			load.Length = length
			return r.stretch(ctx, load)
		},
	}
}

// measure measures all contenders in turn. The events of the start of our load are numbered and projected before.
func (s *session) measure(ctx context.Context, all []*contender) error {
	if err := s.caughtUp(ctx); err != nil {
		return err
	}
	return s.meter.alternate(ctx, all, s.opts.Rounds, s.opts.Length)
}

// result compares our median rate with the best of the others.
func (s *session) result(name, unit string, all []*contender, ours *contender, required float64,
	others ...*contender,
) bench.Result {
	best := slices.MaxFunc(others, func(a, b *contender) int { return cmp.Compare(a.rate(), b.rate()) })
	details := s.meter.rig.Details
	for _, c := range all {
		c.describe(details)
	}
	details["compared"] = ours.name + " with " + best.name
	details["stretches"] = fmt.Sprintf("%d rounds of %s each, medians compared", s.opts.Rounds, s.opts.Length)
	ratio := 0.0
	if best.rate() > 0 {
		ratio = ours.rate() / best.rate()
	}
	return bench.Result{
		Name: name, Value: math.Round(ours.rate()*10) / 10, Unit: unit, Baseline: math.Round(best.rate()*10) / 10,
		Ratio: ratio, Required: required, Passed: ratio >= required, Details: details,
	}
}
