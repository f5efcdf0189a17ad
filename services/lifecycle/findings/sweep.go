package findings

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/findings/detect"
	"github.com/gpuaas/mesh/services/lifecycle/findings/finding"
	"github.com/gpuaas/mesh/services/lifecycle/findings/guard"
	"github.com/gpuaas/mesh/services/lifecycle/findings/scan"
	"github.com/gpuaas/mesh/services/lifecycle/placement"
)

// Conns is how many connections sweeps need: each of the three takes one at a time, and an acknowledgement another.
const Conns = 4

// Deps are the dependencies of a sweeper.
type Deps struct {
	Logger *slog.Logger
	// DB logs in as the role lifecycle, without saga.PoolSettings: sweeps join tables whole, which those forbid.
	DB        *pgxpool.Pool
	Workloads *pgxpool.Pool // the workload database, as its administrator
	Drivers   map[commonv1.PlacementDriver]placement.Driver
	Metrics   prometheus.Registerer
	// Committed is called after each commit that wrote events.
	Committed func()
}

// Config bounds a sweeper. Zero fields mean the defaults.
type Config struct {
	// Grace is how long a thing must have been seen before it is a finding, by the database's clock; 1 min.
	Grace time.Duration
	// Fresh is how old an agent's report may be; 3 min, three times the interval of full observations.
	Fresh time.Duration
	// ProvisionLimit provisions of one tenant and name within ProvisionWindow are a finding; 3 in 15 min.
	ProvisionWindow time.Duration
	ProvisionLimit  int
	// WokenFor is how long a finding on an instance that was started again stays after it was last refused, or ended; 1 h.
	WokenFor time.Duration
	// GoneAfter is how long after its last sight a source that this process does not run counts as gone; 1 h.
	GoneAfter time.Duration
	// Keep is how long an agent's report is kept; 7 days.
	Keep time.Duration
	// Page is how many workspaces, nodes or rows of a kind one statement reads; 500.
	Page int
}

// Default returns the defaults.
func Default() Config {
	return Config{
		Grace: time.Minute, Fresh: 3 * time.Minute, ProvisionWindow: 15 * time.Minute, ProvisionLimit: 3,
		WokenFor: time.Hour, GoneAfter: time.Hour, Keep: 7 * 24 * time.Hour, Page: 500,
	}
}

// Sweeper runs the detectors and keeps the findings.
type Sweeper struct {
	deps   Deps
	cfg    Config
	checks []detector
	// sources are the names of all detectors that this process runs, those with a sweep of their own included.
	sources []string

	open   *prometheus.GaugeVec
	opened *prometheus.CounterVec
	failed *prometheus.CounterVec

	pages  *scan.Pages
	detect *detect.Detectors
	guard  *guard.Guard
	asked  sync.Map // the placements that SweepTwoInstances waits for, by kind
}

// detector is one check. run returns everything that it sees; an error means that it concludes nothing.
type detector struct {
	name string
	run  func(ctx context.Context) ([]finding.Seen, error)
}

// Swept counts what one sweep did.
type Swept struct{ Suspected, Opened, Open, Resolved int }

func (s *Swept) add(one Swept) {
	s.Suspected, s.Opened = s.Suspected+one.Suspected, s.Opened+one.Opened
	s.Open, s.Resolved = s.Open+one.Open, s.Resolved+one.Resolved
}

// New returns a sweeper.
func New(deps Deps, cfg Config) (*Sweeper, error) {
	def := Default()
	for _, d := range []struct{ at, or *time.Duration }{
		{&cfg.Grace, &def.Grace},
		{&cfg.Fresh, &def.Fresh},
		{&cfg.ProvisionWindow, &def.ProvisionWindow},
		{&cfg.WokenFor, &def.WokenFor},
		{&cfg.GoneAfter, &def.GoneAfter},
		{&cfg.Keep, &def.Keep},
	} {
		if *d.at <= 0 {
			*d.at = *d.or
		}
	}
	if cfg.ProvisionLimit <= 0 {
		cfg.ProvisionLimit = def.ProvisionLimit
	}
	if cfg.Page <= 0 {
		cfg.Page = def.Page
	}
	pages := scan.NewPages(deps.DB, cfg.Page)
	s := &Sweeper{
		deps: deps, cfg: cfg, pages: pages, guard: guard.NewGuard(deps.DB, pages),
		detect: detect.NewDetectors(deps.DB, deps.Workloads, pages, detect.DetectorConfig{
			Grace: cfg.Grace, Fresh: cfg.Fresh, ProvisionWindow: cfg.ProvisionWindow, ProvisionLimit: cfg.ProvisionLimit,
			WokenFor: cfg.WokenFor, Keep: cfg.Keep,
		}),
		open: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "findings_open", Help: "Findings that are open, by kind, as this replica last read them.",
		}, []string{"kind"}),
		opened: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "findings_opened_total",
			Help: "Findings that this replica opened, by kind.",
		}, []string{"kind"}),
		failed: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "finding_looks_failed_total", Help: "Scans that could not be finished and so concluded nothing, by detector.",
		}, []string{"look"}),
	}
	if err := errors.Join(deps.Metrics.Register(s.open), deps.Metrics.Register(s.opened),
		deps.Metrics.Register(s.failed)); err != nil {
		return nil, fmt.Errorf("register metrics of findings: %w", err)
	}
	s.checks = []detector{
		{"rows", s.guard.Scan},
		{"records", s.together((*detect.Detectors).Records)},
		{"agents", s.together((*detect.Detectors).Agents)},
		{"schemas", s.detect.Schemas},
		{"provisions", s.together((*detect.Detectors).Provisions)},
		{sourceDisks, s.detect.Disks},
	}
	for _, kind := range slices.Sorted(maps.Keys(deps.Drivers)) {
		s.checks = append(s.checks, detector{"boxes/" + names.Of(kind), func(ctx context.Context) ([]finding.Seen, error) {
			return s.detect.Instances(ctx, kind, deps.Drivers[kind])
		}})
		s.sources = append(s.sources, sourceOfTwo(kind))
	}
	s.sources = append(s.sources, wokenSource)
	for _, d := range s.checks {
		s.sources = append(s.sources, d.name)
	}
	return s, nil
}

// together returns a check of our own rows that reads in one transaction, of which each statement sees what is there
// by then: a check at rest costs one commit.
func (s *Sweeper) together(run func(*detect.Detectors, context.Context) ([]finding.Seen, error),
) func(ctx context.Context) ([]finding.Seen, error) {
	return func(ctx context.Context) ([]finding.Seen, error) {
		var seen []finding.Seen
		err := pg.InTx(ctx, s.deps.DB, func(ctx context.Context, tx pgx.Tx) error {
			var err error
			seen, err = run(s.detect.Over(tx), ctx)
			return err
		})
		return seen, err
	}
}

// Sweep follows the log and runs every check once, one after the other, apart from those that have a sweep of their own
// (SweepTwoInstances, SweepWoken). A check that fails concludes nothing and does not affect the others. Before the
// checks it ends what only detectors that are gone have seen.
func (s *Sweeper) Sweep(ctx context.Context) (Swept, error) {
	var total Swept
	if err := s.detect.Follow(ctx); err != nil {
		return total, err // the detectors would compare with old reports
	}
	if err := s.detect.ForgetReportsInTime(ctx); err != nil {
		return total, err
	}
	standing, err := s.standing(ctx)
	if err != nil {
		return total, err
	}
	errs := []error{s.endGone(ctx, standing, &total)}
	for _, d := range s.checks {
		errs = append(errs, s.check(ctx, d, standing, &total))
	}
	if total.Opened+total.Resolved > 0 {
		errs = append(errs, s.Measure(ctx))
	}
	return total, errors.Join(errs...)
}

var standingSources = pg.Define(pg.RoleLifecycle, "findings.standing_sources", `
		SELECT s.source FROM lifecycle.suspicion s UNION SELECT f.source FROM lifecycle.finding f
			WHERE f.resolved_at IS NULL`)

// standing returns the sources that have a suspicion or an open finding.
func (s *Sweeper) standing(ctx context.Context) ([]string, error) {
	out, err := pg.Values[string](ctx, s.deps.DB, standingSources)
	if err != nil {
		return nil, fmt.Errorf("read standing sources: %w", err)
	}
	return out, nil
}

// check runs one check and applies what it saw. If it saw nothing, and had no suspicion or open finding when the sweep
// began, there is nothing to write.
func (s *Sweeper) check(ctx context.Context, d detector, standing []string, total *Swept) error {
	seen, err := d.run(ctx)
	if err == nil && (len(seen) > 0 || slices.Contains(standing, d.name)) {
		err = s.applyScan(ctx, d.name, seen, total)
	}
	if err != nil {
		s.failed.WithLabelValues(d.name).Inc()
		return fmt.Errorf("check %s: %w", d.name, err)
	}
	return nil
}

var countOpen = pg.Define(pg.RoleLifecycle, "findings.count_open",
	`SELECT f.kind, count(*) AS n FROM lifecycle.finding f WHERE f.resolved_at IS NULL GROUP BY f.kind`)

// Measure sets the metric of open findings from the database. Every replica calls it, also those that do not sweep.
func (s *Sweeper) Measure(ctx context.Context) error {
	open, err := pg.All[struct {
		Kind string `db:"kind"`
		N    int64  `db:"n"`
	}](ctx, s.deps.DB, countOpen)
	if err != nil {
		return fmt.Errorf("count findings: %w", err)
	}
	counts := map[string]float64{}
	for _, kind := range names.Spellings[commonv1.FindingKind]() {
		counts[kind] = 0
	}
	for _, c := range open {
		counts[c.Kind] = float64(c.N)
	}
	for kind, n := range counts {
		s.open.WithLabelValues(kind).Set(n)
	}
	return nil
}
