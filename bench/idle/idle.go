// Package idle measures the cost of a mesh at rest: the transactions of all databases, the write-ahead log, the
// connections and the processor time of each process, over minutes.
//
// The mesh is that of `gpuaas dev`: the four services in this process, Postgres, Redis and the agents beside it.
package idle

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"math"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/bench"
	"github.com/gpuaas/mesh/bench/rig"
	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/config"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/mesh/dev"
	"github.com/gpuaas/mesh/mesh/material"
)

// MostCommits, MostWAL and MostConnections bound the cost of an idle mesh: transactions and bytes of the write-ahead
// log a minute, whole pages apart, and connections.
const (
	MostCommits     = 500
	MostWAL         = 20 << 10
	MostConnections = 24
)

// Options describes how to measure.
type Options struct {
	Length  time.Duration // of the measured stretch; default 2 min
	Warmup  time.Duration // from the moment the mesh is ready; default 1 min
	Nodes   int           // default 3
	Agent   string        // the agent's program; empty: beside this one
	Version string
	Logger  *slog.Logger
}

var defaults = Options{
	Length: 2 * time.Minute, Warmup: time.Minute, Nodes: 3, Logger: slog.New(slog.DiscardHandler),
}

// Run runs the bench.
func Run(ctx context.Context, opts Options) (bench.Result, error) {
	opts = config.Or(opts, defaults)
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	mesh, err := dev.New(ctx,
		dev.Deps{Logger: opts.Logger, Out: io.Discard, Err: io.Discard, Version: opts.Version, Began: time.Now()},
		dev.Config{Ephemeral: true, Nodes: opts.Nodes, AgentBinary: opts.Agent, Statements: true})
	if err != nil {
		return bench.Result{}, fmt.Errorf("build the mesh: %w", err)
	}
	const patience = 5 * time.Minute
	late := time.AfterFunc(patience, func() { cancel(errors.New("the mesh was not ready in time")) })
	defer late.Stop()
	var result bench.Result
	err = mesh.While(ctx, func(ctx context.Context) error {
		late.Stop()
		var err error
		result, err = measure(ctx, opts, mesh)
		return err
	})
	return result, err
}

// pause lets the mesh be for a while.
func pause(ctx context.Context, d time.Duration) error {
	if !app.Sleep(ctx, d) {
		return fmt.Errorf("measure the mesh: %w", context.Cause(ctx))
	}
	return nil
}

// measure measures the mesh while it runs.
func measure(ctx context.Context, opts Options, mesh *dev.Mesh) (bench.Result, error) {
	const countedWithin = 20 * time.Second
	if err := pause(ctx, opts.Warmup); err != nil {
		return bench.Result{}, err
	}
	raw, err := os.ReadFile(material.Layout{Dir: filepath.Join(mesh.Dir(), "material")}.URLFile(pg.RoleOwner))
	if err != nil {
		return bench.Result{}, fmt.Errorf("read the address of the database: %w", err)
	}
	url := strings.TrimSpace(string(raw))
	counters, err := openStatements(ctx, mesh)
	if err != nil {
		return bench.Result{}, err
	}
	defer counters.close(ctx)
	if err := vacuumTables(ctx, counters.url, url); err != nil {
		return bench.Result{}, err
	}
	// Right after a vacuum the counters have more than a mesh at rest makes, probably the vacuum itself.
	if err := pause(ctx, countedWithin); err != nil {
		return bench.Result{}, err
	}
	vacuums, err := countVacuums(ctx, counters.url, url)
	if err != nil {
		return bench.Result{}, err
	}
	before, err := readCounters(ctx, url)
	if err != nil {
		return bench.Result{}, err
	}
	before.vacuums = vacuums
	if err := counters.begin(ctx); err != nil {
		return bench.Result{}, err
	}
	if err := pause(ctx, opts.Length); err != nil {
		return bench.Result{}, err
	}
	list, err := counters.end(ctx)
	if err != nil {
		return bench.Result{}, err
	}
	after, err := readCounters(ctx, url)
	if err != nil {
		return bench.Result{}, err
	}
	if after.vacuums, err = countVacuums(ctx, counters.url, url); err != nil {
		return bench.Result{}, err
	}
	log, err := counters.records(ctx, before.WAL, after.WAL)
	if err != nil {
		return bench.Result{}, err
	}
	result := evaluate(opts, before, after, log)
	log.describe(result.Details, after.at.Sub(before.at))
	describeStatements(result.Details, list, after.at.Sub(before.at))
	return result, nil
}

// seen holds the counters at a moment.
type seen struct {
	counted

	vacuums            vacuums
	at                 time.Time
	services, database time.Duration // processor time of this process, and of the database's
}

var (
	countAll = pg.Define(pg.RoleOwner, "idle.count_all", `
	SELECT (SELECT sum(xact_commit + xact_rollback) FROM pg_stat_database)::bigint AS commits,
		pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::bigint AS wal,
		(SELECT count(*) FROM pg_stat_activity WHERE datid IS NOT NULL AND pid <> pg_backend_pid()) AS connections`)
	serverPIDs = pg.Define(pg.RoleOwner, "idle.server_pids", `SELECT pid FROM pg_stat_activity`)
)

// counted holds the counters of the database.
type counted struct {
	Commits     int64 `db:"commits"`
	WAL         int64 `db:"wal"`
	Connections int64 `db:"connections"`
}

// readCounters reads the counters over a connection of its own, which it closes.
func readCounters(ctx context.Context, url string) (seen, error) {
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return seen{}, fmt.Errorf("connect to the database: %w", err)
	}
	defer conn.Close(context.WithoutCancel(ctx)) // nothing is kept
	c, err := pg.One[counted](ctx, conn, countAll)
	if err != nil {
		return seen{}, fmt.Errorf("read the counters: %w", err)
	}
	out := seen{counted: c, at: time.Now(), services: rig.ProcessorTime(int32(os.Getpid()))} // a process id
	pids, err := pg.Values[int32](ctx, conn, serverPIDs)
	if err != nil {
		return seen{}, fmt.Errorf("read the database's processes: %w", err)
	}
	for _, pid := range pids {
		out.database += rig.ProcessorTime(pid)
	}
	return out, nil
}

// evaluate compares the counts with the limits. How many bytes of the write-ahead log are whole pages depends on when
// the server makes its checkpoints, and not on the writes of a mesh. Where the server does not report how many, a log
// that is small with them passes, and any other is not judged.
func evaluate(opts Options, before, after seen, log records) bench.Result {
	minutes := after.at.Sub(before.at).Minutes()
	per := func(n int64) float64 { return math.Round(float64(n) / minutes) }
	pages := log.pages()
	commits, wal := per(after.Commits-before.Commits), per(after.WAL-before.WAL-pages)
	details := bench.Machine()
	maps.Copy(details, map[string]any{
		"baseline": "transactions a minute that an idle mesh may make", "nodes": opts.Nodes, "length": opts.Length.String(),
		"wal_bytes_per_minute_most":  MostWAL,
		"autovacuums":                after.vacuums.Vacuums - before.vacuums.Vacuums,
		"autoanalyzes":               after.vacuums.Analyzes - before.vacuums.Analyzes,
		"connections":                after.Connections,
		"connections_most":           MostConnections,
		"database_cpu_ms_per_minute": per((after.database - before.database).Milliseconds()),
		"services_cpu_ms_per_minute": per(after.services.Milliseconds() - before.services.Milliseconds()),
	})
	var notChecked []string
	if log.unknown == "" {
		details["wal_bytes_per_minute"], details["wal_full_page_bytes_per_minute"] = wal, per(pages)
		details["wal_vacuum_bytes_per_minute"] = per(log.vacuumed())
	} else {
		details["wal_bytes_per_minute_with_full_pages"] = wal
		if wal > MostWAL {
			notChecked = append(notChecked, "bytes of the write-ahead log: whole pages are in them, and how many is not known, "+
				"because "+log.unknown)
		}
	}
	return bench.Result{
		Name: "idle", Value: commits, Unit: "transactions a minute", Baseline: MostCommits, Ratio: commits / MostCommits,
		Required:   1,
		Passed:     commits <= MostCommits && (wal <= MostWAL || len(notChecked) > 0) && after.Connections <= MostConnections,
		NotChecked: notChecked, Details: details,
	}
}
