// Package lives measures how many bytes a workspace leaves in the database once its terms are over: it creates,
// recreates and decommissions workspaces in a mesh whose terms are a minute, waits until retention has deleted all rows
// that it deletes, and reads the size of every table with its indexes.
//
// The mesh is that of `gpuaas dev`, on a Postgres of the bench's own. Sizes are read after VACUUM FULL, so that they
// are those of the rows and index entries that are left, and less those before the first life.
package lives

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/bench"
	"github.com/gpuaas/mesh/devstack/pgserver"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/config"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/mesh/dev"
	"github.com/gpuaas/mesh/mesh/plans"
)

// Most is how many KB one life may leave in the database after its terms, indexes included.
const Most = 40.0

// Options describes what to measure.
type Options struct {
	Lives   int // default 1000
	Clients int // lives at once; default 4
	// Placement of the workspaces; default: a machine of its own for each instance.
	Placement commonv1.PlacementDriver
	Agent     string // the agent's program; empty: beside this one
	Version   string
	Out       io.Writer // gets the table; nil: none
	Logger    *slog.Logger
}

var defaults = Options{
	Lives: 1000, Clients: 4, Placement: commonv1.PlacementDriver_PLACEMENT_DRIVER_PROCESS,
	Logger: slog.New(slog.DiscardHandler), Out: io.Discard,
}

// Terms is the policy of a mesh in which all history is over after a minute. The floors of the terms are a minute as
// well, and a certificate lives for a minute and a half.
const Terms = `acknowledge_weakening: a bench measures what is left after the terms
node.certificate_ttl_seconds: 90
node.recovery_token_max_age_seconds: 300
node.stream_max_age_seconds: 60
audit.dedupe_window_seconds: 10
operation.key_promise_seconds: 60
retention.tasks_seconds: 60
retention.runs_seconds: 60
retention.workspaces_seconds: 60
retention.operation_keys_seconds: 60
retention.findings_seconds: 60
retention.identities_seconds: 60
retention.credentials_seconds: 60
retention.recoveries_seconds: 60
retention.timeline_seconds: 60
retention.events_seconds: 60
retention.audit_seconds: 60
`

// forgetAfter is how long tables that services work with keep what has ended, and how long a secret of a launch is
// good.
const forgetAfter = 3 * time.Minute

// longest is the longest time until a row of a life that has ended is over: the secret of its launch expires, and then
// the term.
const longest = forgetAfter + time.Minute

// sweep is how often the services of the bench cut.
const sweep = 5 * time.Second

// Run runs the bench.
func Run(ctx context.Context, o Options) (bench.Result, error) {
	if o.Lives < 0 || o.Clients < 0 {
		return bench.Result{}, fmt.Errorf("bench lives: %d lives of %d clients", o.Lives, o.Clients)
	}
	o = config.Or(o, defaults)
	var m measured
	var result bench.Result
	err := o.inMesh(ctx, func(ctx context.Context, mesh *dev.Mesh, server *pgserver.Server) error {
		var err error
		m, err = o.live(ctx, mesh, server)
		return err
	}, func(ctx context.Context, server *pgserver.Server) error {
		var err error
		result, err = o.evaluate(ctx, m, server)
		return err
	})
	return result, err
}

// inMesh calls work in a mesh of the bench's own whose terms are a minute, and after once the mesh has ended and its
// database is still there.
func (o Options) inMesh(ctx context.Context, work func(context.Context, *dev.Mesh, *pgserver.Server) error,
	after func(context.Context, *pgserver.Server) error,
) error {
	return plans.WithServer(ctx, o.Logger, func(ctx context.Context, server *pgserver.Server, dir string) error {
		terms := filepath.Join(dir, "policy.yaml")
		if err := os.WriteFile(terms, []byte(Terms), 0o600); err != nil {
			return fmt.Errorf("write the terms: %w", err)
		}
		deps := dev.Deps{Logger: o.Logger, Out: io.Discard, Err: io.Discard, Version: o.Version, Began: time.Now()}
		mesh, err := dev.New(ctx, deps, dev.Config{
			Ephemeral: true, NoDemo: true, Nodes: 1, AgentBinary: o.Agent, DatabaseURL: server.AdminURL(), PolicyFile: terms,
			RetentionSweep: sweep, KeepEnded: time.Minute, ForgetAfter: forgetAfter,
		})
		if err != nil {
			return fmt.Errorf("build the mesh: %w", err)
		}
		if err := mesh.While(ctx, func(ctx context.Context) error { return work(ctx, mesh, server) }); err != nil {
			return err
		}
		return after(ctx, server)
	})
}

// measured holds the times of the lives until the mesh was stopped.
type measured struct {
	before sizes // of the mesh without a life
	peak   sizes // right after the last life
	took   time.Duration
	waited time.Duration // from the end of the last life until all was cut
}

// live makes the lives and waits until retention has nothing left to do.
func (o Options) live(ctx context.Context, mesh *dev.Mesh, server *pgserver.Server) (measured, error) {
	conn, err := connect(ctx, server)
	if err != nil {
		return measured{}, err
	}
	defer conn.Close(context.WithoutCancel(ctx)) // nothing is kept
	w := &world{o: o, client: mesh.Client()}
	if err := w.tenant(ctx); err != nil {
		return measured{}, err
	}
	// The first lives make the rows that all later ones share: of the tenant, of keys, of jobs.
	if err := w.many(ctx, 1); err != nil {
		return measured{}, err
	}
	if err := awaitCuts(ctx, conn); err != nil {
		return measured{}, err
	}
	var m measured
	if m.before, err = compact(ctx, conn); err != nil {
		return measured{}, err
	}
	began := time.Now()
	if err := w.many(ctx, o.Lives); err != nil {
		return measured{}, err
	}
	m.took = time.Since(began)
	if m.peak, err = read(ctx, conn); err != nil {
		return measured{}, err
	}
	began = time.Now()
	if err := awaitCuts(ctx, conn); err != nil {
		return measured{}, err
	}
	m.waited = time.Since(began)
	return m, nil
}

func connect(ctx context.Context, server *pgserver.Server) (*pgx.Conn, error) {
	conn, err := pgx.Connect(ctx, server.AdminURLOf(pg.DatabaseMesh))
	if err != nil {
		return nil, fmt.Errorf("connect to the database: %w", err)
	}
	return conn, nil
}

// evaluate reads the remaining bytes, prints them by table, the largest first, and compares them with the limit.
func (o Options) evaluate(ctx context.Context, m measured, server *pgserver.Server) (bench.Result, error) {
	conn, err := connect(ctx, server)
	if err != nil {
		return bench.Result{}, err
	}
	defer conn.Close(context.WithoutCancel(ctx)) // nothing is kept
	onDisk, err := read(ctx, conn)
	if err != nil {
		return bench.Result{}, err
	}
	after, err := compact(ctx, conn)
	if err != nil {
		return bench.Result{}, err
	}
	per := func(n int64) float64 { return float64(n) / 1024 / float64(o.Lives) }
	names := slices.SortedFunc(maps.Keys(after), func(a, b string) int {
		return cmp.Or(cmp.Compare(after[b].Bytes-m.before[b].Bytes, after[a].Bytes-m.before[a].Bytes), cmp.Compare(a, b))
	})
	var left, peak, disk int64
	var table strings.Builder
	fmt.Fprintf(&table, "%-36s %12s %12s %12s %12s\n", "table", "KB a life", "rows a life", "KB at peak", "KB on disk")
	for _, name := range names {
		was, now := m.before[name], after[name]
		left, peak, disk = left+now.Bytes-was.Bytes, peak+m.peak[name].Bytes-was.Bytes, disk+onDisk[name].Bytes-was.Bytes
		if now.Bytes == was.Bytes && m.peak[name].Bytes == was.Bytes {
			continue
		}
		fmt.Fprintf(&table, "%-36s %12.2f %12.2f %12.2f %12.2f\n", name, per(now.Bytes-was.Bytes),
			float64(now.Rows-was.Rows)/float64(o.Lives), per(m.peak[name].Bytes-was.Bytes),
			per(onDisk[name].Bytes-was.Bytes))
	}
	if _, err := io.WriteString(o.Out, table.String()); err != nil {
		return bench.Result{}, fmt.Errorf("print the table: %w", err)
	}
	details := bench.Machine()
	maps.Copy(details, map[string]any{
		"baseline": "KB that a life may leave after its terms, indexes included", "lives": o.Lives, "clients": o.Clients,
		"took": m.took.Round(time.Second).String(), "waited": m.waited.Round(time.Second).String(),
		"kb_a_life_at_peak": per(peak), "kb_a_life_on_disk": per(disk),
	})
	value := per(left)
	return bench.Result{
		Name: "lives", Value: value, Unit: "KB a life after its terms", Baseline: Most, Ratio: value / Most, Required: 1,
		Passed: value <= Most, Details: details,
	}, nil
}

// walksWithin is how long after the longest term the bench waits for the walks.
const walksWithin = 10 * time.Minute

// awaitCuts returns once every walk of retention has come to its end twice after the longest term, and fails if they
// do not within walksWithin.
func awaitCuts(ctx context.Context, conn *pgx.Conn) error {
	over, err := pg.Value[time.Time](ctx, conn, clock)
	if err != nil {
		return fmt.Errorf("read the clock: %w", err)
	}
	over = over.Add(longest)
	ctx, cancel := context.WithTimeoutCause(ctx, longest+walksWithin,
		errors.New("walks of retention do not come to their end: see `gpuaas retention status`"))
	defer cancel()
	for range 2 {
		for {
			if !app.Sleep(ctx, time.Second) {
				return fmt.Errorf("wait for retention: %w", context.Cause(ctx))
			}
			done, err := pg.Value[bool](ctx, conn, walkedSince, over)
			if err != nil {
				return fmt.Errorf("read the accounts of retention: %w", err)
			}
			if done {
				break
			}
		}
		if over, err = pg.Value[time.Time](ctx, conn, clock); err != nil {
			return fmt.Errorf("read the clock: %w", err)
		}
	}
	return nil
}
