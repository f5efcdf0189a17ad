// Package rig holds the common parts of the benches: the database under measurement, the baseline of plain commits,
// replicas of lifecycle's sagas, the rounds in which ours and the baseline are measured in turn, and the verdict.
package rig

import (
	"context"
	"fmt"
	"maps"
	"math"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/gpuaas/mesh/bench"
	"github.com/gpuaas/mesh/internal/pg"
)

// The application names of a replica's sessions at the database.
const (
	LifecycleSessions = "bench lifecycle"
	SequencerSessions = "bench sequencer"
)

// RateClients is how many clients commit at once where the rate of commits is the baseline.
const RateClients = 16

var (
	makeSchema  = pg.Define(pg.RoleOwner, "rig.make_schema", `CREATE SCHEMA IF NOT EXISTS bench`)
	forgetTable = pg.Define(pg.RoleOwner, "rig.forget_table", `DROP TABLE IF EXISTS bench.commits`)
	dropSchema  = pg.Define(pg.RoleOwner, "rig.drop_schema", `DROP SCHEMA bench CASCADE`)
	makeTable   = pg.Define(pg.RoleOwner, "rig.make_table", `
	CREATE TABLE bench.commits (id bigint GENERATED ALWAYS AS IDENTITY (CACHE 100) PRIMARY KEY, n bigint NOT NULL)`)
	insertCommit = pg.DefineUnprepared(pg.RoleOwner, "rig.insert_commit", "the rig makes its table",
		func(struct{}) string {
			return `INSERT INTO bench.commits (n) VALUES ($1)`
		}).For(struct{}{})
)

// Rig is the database of a bench, and the environment that it runs in.
type Rig struct {
	Owner *pgxpool.Pool // the role that made the schemas
	// Details are those of the result: the environment, and what the bench adds.
	Details map[string]any
}

// Open opens the database for a number of clients of the baseline, and makes the baseline's table: one bigint a row,
// and a primary key that grows, so that its pages stay hot.
func Open(ctx context.Context, ownerURL string, clients int32) (*Rig, error) {
	owner, err := pg.Open(ctx, pg.Config{
		URL: ownerURL, ApplicationName: "bench baseline", MaxConns: clients,
		MinConns: clients,
	})
	if err != nil {
		return nil, fmt.Errorf("open database: %w", err)
	}
	r := &Rig{Owner: owner}
	if r.Details, err = bench.Environment(ctx, owner); err != nil {
		owner.Close()
		return nil, err
	}
	for _, s := range []*pg.Statement{makeSchema, forgetTable, makeTable} {
		if _, err := pg.Exec(ctx, owner, s); err != nil {
			owner.Close()
			return nil, fmt.Errorf("make baseline table: %w", err)
		}
	}
	return r, nil
}

// Close drops the baseline's table and closes the database.
func (r *Rig) Close(ctx context.Context) {
	_, _ = pg.Exec(context.WithoutCancel(ctx), r.Owner, dropSchema)
	r.Owner.Close()
}

// CommitTimes returns how long each of n durable commits of a single row took, in one round trip each, by one client on
// a connection of its own.
func (r *Rig) CommitTimes(ctx context.Context, n int) ([]time.Duration, error) {
	took := make([]time.Duration, 0, n)
	err := r.Owner.AcquireFunc(ctx, func(conn *pgxpool.Conn) error {
		for i := range n {
			began := time.Now()
			if _, err := pg.Exec(ctx, conn, insertCommit, i); err != nil {
				return err
			}
			took = append(took, time.Since(began))
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("measure commits: %w", err)
	}
	return took, nil
}

// CommitRate returns how many commits of a single row RateClients make a second, each on a connection of its own with
// the statement prepared.
func (r *Rig) CommitRate(ctx context.Context, length time.Duration) (float64, error) {
	var done atomic.Int64
	var clients errgroup.Group
	began := time.Now()
	until := began.Add(length)
	for range RateClients {
		clients.Go(func() error {
			return r.Owner.AcquireFunc(ctx, func(conn *pgxpool.Conn) error {
				for n := int64(0); time.Now().Before(until); n++ {
					if _, err := pg.Exec(ctx, conn, insertCommit, n); err != nil {
						return err
					}
					done.Add(1)
				}
				return nil
			})
		})
	}
	if err := clients.Wait(); err != nil {
		return 0, fmt.Errorf("measure commits: %w", err)
	}
	return float64(done.Load()) / time.Since(began).Seconds(), nil
}

// Rates are units a second of ours, and commits a second of the baseline.
type Rates struct{ Ours, Baseline float64 }

// Alternate measures the rates in rounds: half a length of commits, a length of ours, and half a length of commits.
// ours returns how many units there were a second. The cost of a unit of ours is recorded: processor time of this
// process and of the database's sessions, and bytes of the write-ahead log.
func (r *Rig) Alternate(ctx context.Context, rounds int, length time.Duration,
	ours func(context.Context, time.Duration) (float64, error),
) (Rates, error) {
	var base, rate []float64
	var spent cost
	units := 0.0
	for range rounds {
		before, err := r.CommitRate(ctx, length/2)
		if err != nil {
			return Rates{}, err
		}
		var n float64
		err = r.spend(ctx, &spent, func(ctx context.Context) error {
			began := time.Now()
			n, err = ours(ctx, length)
			units += n * time.Since(began).Seconds()
			return err
		})
		if err != nil {
			return Rates{}, err
		}
		after, err := r.CommitRate(ctx, length/2)
		if err != nil {
			return Rates{}, err
		}
		base, rate = append(base, (before+after)/2), append(rate, n)
	}
	maps.Copy(r.Details, map[string]any{
		"baseline":        fmt.Sprintf("single-row commits/s, %d clients, one round trip each", RateClients),
		"baseline_rounds": rounded(base), "value_rounds": rounded(rate),
	})
	if units > 0 {
		per := func(took time.Duration) float64 { return math.Round(1000*took.Seconds()*1000/units) / 1000 }
		maps.Copy(r.Details, map[string]any{
			"wal_bytes_per_unit":      math.Round(float64(spent.wal) / units),
			"wal_full_pages_per_unit": math.Round(1000*float64(spent.pages)/units) / 1000,
			"cpu_ms_per_unit":         per(spent.cpu), "cpu_ms_per_unit_go": per(spent.own),
			"cpu_ms_per_unit_lifecycle": per(spent.by[LifecycleSessions]),
			"cpu_ms_per_unit_sequencer": per(spent.by[SequencerSessions]),
		})
	}
	return Rates{Ours: mean(rate), Baseline: mean(base)}, nil
}

// AtLeast returns the result of a bench whose ratio must reach the required one.
func (r *Rig) AtLeast(name, unit string, rates Rates, required float64) bench.Result {
	ratio := rates.Ours / rates.Baseline
	return bench.Result{
		Name: name, Value: math.Round(rates.Ours*10) / 10, Unit: unit, Baseline: math.Round(rates.Baseline), Ratio: ratio,
		Required: required, Passed: ratio >= required, Details: r.Details,
	}
}

// AtMost returns the result of a bench whose value, a p95 in milliseconds, may not be more than most.
func (r *Rig) AtMost(name, unit string, value, baseline, most float64) bench.Result {
	r.Details["required_ms_p95"] = most
	return bench.Result{
		Name: name, Value: value, Unit: unit, Baseline: baseline, Ratio: value / baseline, Required: most / baseline,
		Passed: value <= most, Details: r.Details,
	}
}

// Times returns a text of percentiles of durations, in milliseconds.
func Times(took []time.Duration) string {
	return fmt.Sprintf("p50 %.1f, p95 %.1f, max %.1f of %d", bench.Percentile(took, .5), bench.Percentile(took, .95),
		bench.Percentile(took, 1), len(took))
}

func mean(list []float64) float64 {
	sum := 0.0
	for _, v := range list {
		sum += v
	}
	return sum / float64(len(list))
}

func rounded(list []float64) []float64 {
	out := make([]float64, len(list))
	for i, v := range list {
		out[i] = math.Round(v*10) / 10
	}
	return out
}
