package fleet

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/gpuaas/mesh/bench"
	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/config"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/mesh/plans"
	"github.com/gpuaas/mesh/services/lifecycle/findings"
)

// sweeps are the jobs that compare all of a fleet.
var sweeps = []string{"claims", "findings", "machine_orphans", "orphans", "shared_orphans", "two_instances"}

// SweepOptions describes the fleet on which to wait for sweeps.
type SweepOptions struct {
	Nodes, Workspaces int
	Instances         bool          // the machines are instances, one for each workspace
	Limit             time.Duration // 10 minutes
	// Standing is how long the services run before the last round of sweeps begins. The default is StandingFor: a sweep
	// reports and acts on a fault only after it has lasted for a while.
	Standing       time.Duration
	Agent, Version string
	Logger         *slog.Logger
}

// StandingFor returns how long something has to be wrong before a sweep reports it and the watchdog takes a machine for
// lost.
func StandingFor() time.Duration {
	return max(findings.Default().Grace, policy.Defaults().HeartbeatStaleAfter())
}

// found is the number of findings, or actions, of one kind by a sweep or a watchdog.
type found struct {
	What string `db:"what"`
	N    int64  `db:"n"`
}

// foundBySweeps counts the rows that a fleet at rest has none of: those that are open, and those that began after the
// load and are over.
var foundBySweeps = pg.Define(pg.RoleOwner, "bench.found_by_sweeps", `
	WITH load AS (SELECT s.seeded_at AS at FROM mesh.seeded s)
	SELECT 'finding ' || f.kind AS what, count(*) AS n FROM lifecycle.finding f, load
		WHERE f.resolved_at IS NULL OR f.first_seen_at > load.at GROUP BY 1
	UNION ALL SELECT 'suspicion ' || s.kind, count(*) FROM lifecycle.suspicion s GROUP BY 1
	UNION ALL SELECT 'incident ' || i.kind, count(*) FROM recovery.incident i, load
		WHERE i.closed_at IS NULL OR i.opened_at > load.at GROUP BY 1
	UNION ALL SELECT 'brake for ' || b.cause, 1 FROM recovery.brake b WHERE b.engaged
	UNION ALL SELECT 'recovery', count(*) FROM recovery.recovery_record r HAVING count(*) > 0
	UNION ALL SELECT 'workspace ' || w.state, count(*) FROM lifecycle.workspace w WHERE w.state <> 'active' GROUP BY 1
	UNION ALL SELECT 'identity ' || d.state, count(*) FROM recovery.identity d WHERE d.state <> 'active' GROUP BY 1
	ORDER BY 1`)

// RunSweeps starts the services of a mesh on a fleet, and reports what their first rounds of sweeps find, two at least
// and one after StandingFor: they find nothing on a fleet that is as a mesh has written it.
func RunSweeps(ctx context.Context, o SweepOptions) (bench.Result, error) {
	o = config.Or(o, SweepOptions{
		Limit: 10 * time.Minute, Standing: StandingFor(), Logger: slog.New(slog.DiscardHandler),
	})
	size := plans.Size{Nodes: o.Nodes, Workspaces: o.Workspaces, Schemas: true, Instances: o.Instances}
	if err := room(os.TempDir(), needed(size)); err != nil {
		return bench.Result{}, err
	}
	var result bench.Result
	err := plans.Serve(ctx, plans.Source{Agent: o.Agent, Version: o.Version, Instances: o.Instances, Logger: o.Logger},
		size,
		func(ctx context.Context, r plans.Running) error {
			var err error
			result, err = awaitSweeps(ctx, o, r)
			return err
		})
	return result, err
}

func awaitSweeps(ctx context.Context, o SweepOptions, r plans.Running) (bench.Result, error) {
	began := time.Now()
	var stood map[string]float64
	for {
		done, err := succeeded(r.Mesh.Registry().Gatherer())
		if err != nil {
			return bench.Result{}, err
		}
		if stood == nil && time.Since(began) >= o.Standing {
			stood = done
		}
		waiting := notRun(done, stood)
		if len(waiting) == 0 {
			break
		}
		if time.Since(began) > o.Limit || !app.Sleep(ctx, 200*time.Millisecond) {
			return bench.Result{}, fmt.Errorf("sweeps did not end within %s: %s", o.Limit, strings.Join(waiting, ", "))
		}
	}
	conn, err := pgx.Connect(ctx, r.URL)
	if err != nil {
		return bench.Result{}, fmt.Errorf("connect to the database: %w", err)
	}
	defer conn.Close(context.WithoutCancel(ctx)) // nothing is kept
	list, err := pg.All[found](ctx, conn, foundBySweeps)
	if err != nil {
		return bench.Result{}, fmt.Errorf("read what the sweeps have found: %w", err)
	}
	var total int64
	what := []string{}
	for _, f := range list {
		total += f.N
		what = append(what, fmt.Sprintf("%s: %d", f.What, f.N))
	}
	details := bench.Machine()
	maps.Copy(details, map[string]any{
		"nodes": o.Nodes, "workspaces": o.Workspaces, "instances": o.Instances, "sweeps": sweeps, "found": what,
		"standing": o.Standing.String(), "baseline": "what rounds of sweeps may find and the brake may stop",
	})
	return bench.Result{
		Name: "fleet sweeps", Value: float64(total), Unit: "findings, incidents, recoveries and brakes", Baseline: 0,
		Ratio: float64(total), Required: 0, Passed: total == 0, Details: details,
	}, nil
}

// rounds is how often each sweep has to succeed: a sweep reports what the one before it suspected. It has to succeed as
// often again after the fleet has stood for long enough: the first to end then may have begun before.
const rounds = 2

// notRun returns the sweeps that have not succeeded so often yet, of which stood had succeeded when the fleet had stood
// for long enough; nil: it has not yet, and all are waited for.
func notRun(done, stood map[string]float64) []string {
	return slices.DeleteFunc(slices.Clone(sweeps),
		func(s string) bool { return stood != nil && done[s] >= stood[s]+rounds })
}

// succeeded returns how often each job has succeeded.
func succeeded(from prometheus.Gatherer) (map[string]float64, error) {
	families, err := from.Gather()
	if err != nil {
		return nil, fmt.Errorf("read the metrics of the mesh: %w", err)
	}
	done := map[string]float64{}
	for _, f := range families {
		if !strings.HasSuffix(f.GetName(), "background_runs_total") {
			continue
		}
		for _, m := range f.GetMetric() {
			labels := map[string]string{}
			for _, l := range m.GetLabel() {
				labels[l.GetName()] = l.GetValue()
			}
			if labels["outcome"] == "done" {
				done[labels["job"]] += m.GetCounter().GetValue()
			}
		}
	}
	return done, nil
}
