package operation

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/lock"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/secretenv"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/allocation"
	"github.com/gpuaas/mesh/services/lifecycle/placement"
	"github.com/gpuaas/mesh/services/lifecycle/placement/static"
	"github.com/gpuaas/mesh/services/lifecycle/provision"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
	"github.com/gpuaas/mesh/services/lifecycle/saga/drive"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
	"github.com/gpuaas/mesh/services/lifecycle/schema"
	"github.com/gpuaas/mesh/services/lifecycle/task/dispatch"
	"github.com/gpuaas/mesh/services/lifecycle/workspace"
)

// stage is a cluster whose drivers work only while the test runs them, and die at the point that the test sets.
type stage struct {
	*cluster

	pool      *pgxpool.Pool
	workloads *pgxpool.Pool
	tasks     *dispatch.Server
	secrets   *secretenv.Keys
	offset    time.Duration
	lives     int
	living    atomic.Pointer[saga.Core] // of the driver that lives; nil: none does

	mu     sync.Mutex
	faults map[string]string // step and direction → the way in which it fails
	hits   map[string]int
}

const stageLease = 3 * time.Second

func newStage(t *testing.T, joins func(int) *lock.Lock) *stage {
	t.Helper()
	testkit.IO(t)
	p := &cluster{t: t, db: testkit.DB(t), world: newWorld()}
	p.world.replica = ids.New()
	p.beat(100000 * time.Hour)
	workloads, err := pg.Open(t.Context(), pg.Config{URL: p.db.WorkloadURL(), MaxConns: 4})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(workloads.Close)
	keys := secretKeys(t, secretenv.NewKey())
	cfg := clusterConfig{seats: 2, joins: joins, secrets: keys, signing: keys}
	g := &stage{cluster: p, workloads: workloads, secrets: keys, faults: map[string]string{}, hits: map[string]int{}}
	committed := func() {
		if core := g.living.Load(); core != nil {
			core.Committed()
		}
	}
	for n := range cfg.seats {
		p.seats = append(p.seats, p.sit(n, cfg, workloads, p.world, committed))
	}
	g.pool, g.tasks = p.seats[0].pool, p.world.tasks
	ctx, stop := context.WithCancel(context.WithoutCancel(t.Context()))
	done := make(chan struct{})
	go func() { defer close(done); p.world.play(ctx) }()
	t.Cleanup(func() { stop(); <-done })
	return g
}

// jump moves the mesh clock forward.
func (g *stage) jump(by time.Duration) {
	g.t.Helper()
	g.offset += by
	testkit.SetClockOffset(g.db, g.offset)
}

// The ways in which a step fails: before it has done anything, after it has done everything, or the first time alone.
const (
	failsBefore = "before"
	failsAfter  = "after"
	failsOnce   = "once"
)

func (g *stage) around(name, dir string, fn saga.StepFunc) saga.StepFunc {
	fail := func() error {
		g.mu.Lock()
		defer g.mu.Unlock()
		g.hits[name+"/"+dir]++
		return saga.Retry(commonv1.OwnerLayer_OWNER_LAYER_WORKFLOW, commonv1.Reason_REASON_UNAVAILABLE, "it was made to fail",
			nil)
	}
	return func(ctx context.Context, env *saga.Env) (saga.Outcome, error) {
		g.mu.Lock()
		how := g.faults[name+"/"+dir]
		if how == failsOnce {
			delete(g.faults, name+"/"+dir)
		}
		g.mu.Unlock()
		if how == failsBefore || how == failsOnce {
			return saga.Outcome{}, fail()
		}
		out, err := fn(ctx, env)
		if how == failsAfter && err == nil && !out.Waits() {
			return saga.Outcome{}, fail()
		}
		return out, err
	}
}

// registry returns the product's registry, with steps that can be made to fail and that are not tried again for long.
func (g *stage) registry(steps *provision.Steps) *saga.Registry {
	g.t.Helper()
	reg, err := steps.Registry()
	if err != nil {
		g.t.Fatal(err)
	}
	quick := func(p saga.RetryPolicy) saga.RetryPolicy {
		p.Attempts, p.First, p.Max = min(p.Attempts, 2), time.Millisecond, 5*time.Millisecond
		return p
	}
	for _, def := range reg.All() {
		for i := range def.Steps {
			s := &def.Steps[i]
			s.Retry, s.UndoRetry = quick(s.Retry), quick(s.UndoRetry)
			s.Do = g.around(s.Name, "do", s.Do)
			if s.Undo != nil {
				s.Undo = g.around(s.Name, "undo", s.Undo)
			}
		}
	}
	return reg
}

var errDied = errors.New("the driver died here")

// drive runs one driver until rested returns true, or until it has passed so many points between two effects, at which
// it dies. The driver that follows a dead one finds its leases expired.
func (g *stage) drive(points int64, rested func() bool) bool {
	g.t.Helper()
	g.lives++
	var core *saga.Core
	steps := provision.NewSteps(provision.StepDeps{
		Logger: testkit.Logger(g.t), DB: g.pool, Workloads: g.workloads, Committed: func() { core.Committed() },
		Tasks: g.tasks, Identities: g.world,
		Secret: make([]byte, 32), Secrets: g.secrets, Catalogue: catalogue(),
		Drivers: map[commonv1.PlacementDriver]placement.Driver{
			commonv1.PlacementDriver_PLACEMENT_DRIVER_PROCESS: g.world,
			commonv1.PlacementDriver_PLACEMENT_DRIVER_STATIC:  static.New(g.pool),
		},
	})
	var passed atomic.Int64
	died := make(chan struct{})
	die := sync.OnceFunc(func() { close(died) })
	core, err := saga.New(saga.Deps{
		DB: g.pool, Registry: g.registry(steps), Logger: testkit.Logger(g.t),
		OnPoint: func(context.Context, string, saga.Place) error {
			if points > 0 && passed.Add(1) >= points {
				die()
				return errDied
			}
			return nil
		},
	})
	if err != nil {
		g.t.Fatal(err)
	}
	driver, err := drive.New(core, drive.Config{
		Owner: fmt.Sprintf("life-%d", g.lives), Workers: 2, Lease: stageLease, Heartbeat: stageLease / 4,
		Poll: 100 * time.Millisecond, CancelGrace: 2 * time.Second, StopGrace: 5 * time.Second, StallSweep: time.Hour,
		MaxLosses: 1000,
	})
	if err != nil {
		g.t.Fatal(err)
	}
	g.living.Store(core)
	defer g.living.Store(nil)
	ctx, stop := context.WithCancel(testkit.Context(g.t))
	defer stop()
	ended := make(chan error, 1)
	go func() { ended <- driver.Run(ctx) }()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	dead := false
	for over := false; !over; {
		select {
		case <-died:
			driver.Abandon()
			dead, over = true, true
		case <-tick.C:
			over = rested()
		case <-ctx.Done():
			over = true
		}
	}
	stop()
	if err := <-ended; err != nil {
		g.t.Errorf("driver: %v", err)
	}
	if dead {
		g.jump(stageLease + time.Second)
	}
	return dead
}

// view reads a workspace in the form that the rules use.
func (g *stage) view(id string) (sketch, runs.Run, error) {
	ctx := testkit.Context(g.t)
	w, err := workspace.Get(ctx, g.pool, id)
	if err != nil {
		return sketch{}, runs.Run{}, err
	}
	run, err := runs.Get(ctx, g.pool, w.RunID)
	if err != nil {
		return sketch{}, runs.Run{}, err
	}
	s := sketch{
		ID: w.ID, State: w.State, Epoch: w.Epoch, Run: run.ID, Kind: run.Kind, Open: run.Live(), Undoing: run.Live() &&
			run.Phase == "undo",
		Cancelled: run.Live() && run.CancelAt != nil, Stuck: run.State == "stuck", Reset: w.ResetDone, Used: w.RetryUsed,
		Leaving: w.DesiredState == "decommissioned",
	}
	err = g.pool.QueryRow(ctx, `
		SELECT count(*) FILTER (WHERE kind = 'instance') > 0,
			count(*) FILTER (WHERE kind IN ('instance', 'storage', 'workload') AND node_id IS NOT NULL) > 0
		FROM lifecycle.resource_claim
			WHERE workspace_id = $1 AND released_at IS NULL AND orphaned_at IS NULL`, id).Scan(&s.WithInstance, &s.Placed)
	if err == nil {
		err = g.pool.QueryRow(ctx, `SELECT count(*) > 0, coalesce(bool_or(EXISTS (SELECT FROM lifecycle.resource_claim c
				WHERE c.workspace_id = a.workspace_id AND c.epoch = a.epoch AND c.orphaned_at IS NOT NULL
					AND c.released_at IS NULL)), false)
			FROM lifecycle.allocation a WHERE a.workspace_id = $1 AND a.state = 'release_failed'`, id).
			Scan(&s.Unclean, &s.Orphans)
	}
	if err == nil && s.onItsWay() && run.StepName() == provision.StepStorage &&
		strings.HasPrefix(run.StuckReason, "step_stalled") {
		err = g.pool.QueryRow(ctx, `SELECT count(*) = 1 FROM lifecycle.instance i
			LEFT JOIN lifecycle.node_gate g ON g.node_id = i.node_id
			WHERE i.workspace_id = $1 AND i.state = 'live' AND i.placement <> 'static'
				AND g.session_epoch = 0`, id).Scan(&s.WithoutInstance)
	}
	s.Held = run.Live() && (run.Owner != "" || run.State == "pending")
	return s, run, err
}

// traces returns all rows that a request could leave.
func (g *stage) traces(tenant string) (string, error) {
	var out string
	err := g.db.OwnerPool().QueryRow(testkit.Context(g.t), `SELECT md5(concat(
		(SELECT string_agg(concat_ws('/', w.id, w.state, w.epoch, w.version, w.reset_done, w.retry_used, w.run_id), ','
			ORDER BY w.id) FROM lifecycle.workspace w WHERE w.tenant_id = $1),
		(SELECT string_agg(concat_ws('/', r.id, r.state, r.phase, r.step, r.version, r.cancel_requested_at, r.archived_at),
			',' ORDER BY r.id) FROM lifecycle.saga_run r WHERE r.tenant_id = $1),
		(SELECT string_agg(concat_ws('/', s.run_id, s.step, s.dir, s.attempt, s.version), ','
			ORDER BY s.run_id, s.step, s.dir, s.attempt) FROM lifecycle.saga_step s WHERE s.tenant_id = $1),
		(SELECT string_agg(concat_ws('/', c.id, c.version), ',' ORDER BY c.id) FROM lifecycle.resource_claim c
			WHERE c.tenant_id = $1),
		(SELECT string_agg(concat_ws('/', a.allocation_id, a.version), ',' ORDER BY a.allocation_id)
			FROM lifecycle.allocation a WHERE a.tenant_id = $1)))`, tenant).Scan(&out)
	return out, err
}

// history is the observed state that may grow and never shrinks.
type history struct {
	runs, attempts, claims int
	over                   map[string]bool // claims that were released
}

// wrong returns every violated invariant of a workspace, of those that hold at any moment.
func (g *stage) wrong(id string, before *history) ([]string, error) {
	ctx := testkit.Context(g.t)
	var out []string
	for what, sql := range map[string]string{
		"two runs are live": `SELECT count(*) > 1 FROM lifecycle.saga_run
			WHERE workspace_id = $1 AND finished_at IS NULL`,
		"a run is live beside its state": `SELECT count(*) > 0 FROM lifecycle.saga_run
			WHERE workspace_id = $1 AND (finished_at IS NULL) <> (state NOT IN ('succeeded', 'failed'))`,
		"two boxes are not ended": `SELECT count(*) > 1 FROM lifecycle.instance
			WHERE workspace_id = $1 AND state <> 'ended'`,
		"a box of another epoch is not ended": `SELECT count(*) > 0 FROM lifecycle.instance i
			JOIN lifecycle.workspace w ON w.id = i.workspace_id WHERE w.id = $1 AND w.state = 'active' AND i.state <> 'ended'
			AND i.epoch <> w.epoch`,
		"an active workspace has no live box": `SELECT count(*) > 0 FROM lifecycle.workspace w
			WHERE w.id = $1 AND w.state = 'active' AND NOT EXISTS (SELECT 1 FROM lifecycle.instance i
			WHERE i.workspace_id = w.id AND i.epoch = w.epoch AND i.state = 'live')`,
		"an active workspace has no allocation": `SELECT count(*) > 0 FROM lifecycle.workspace w
			WHERE w.id = $1 AND w.state = 'active' AND NOT EXISTS (SELECT 1 FROM lifecycle.allocation a
			WHERE a.workspace_id = w.id AND a.epoch = w.epoch AND a.state = 'active' AND a.occupancy = 'in_use')`,
		"an active allocation has too few devices": `SELECT count(*) > 0 FROM lifecycle.allocation a
			WHERE a.workspace_id = $1 AND a.state = 'active' AND a.gpus <> (SELECT count(*) FROM lifecycle.gpu_hold h
			WHERE h.allocation_id = a.allocation_id)`,
		"a device is held for what is released": `SELECT count(*) > 0 FROM lifecycle.gpu_hold h JOIN lifecycle.allocation a
			USING (allocation_id) WHERE a.workspace_id = $1 AND a.state = 'released'`,
		"an allocation is held by nobody": `SELECT count(*) > 0 FROM lifecycle.allocation a
			JOIN lifecycle.workspace w ON w.id = a.workspace_id
			WHERE w.id = $1 AND w.state IN ('decommissioned') AND a.state NOT IN ('released', 'release_failed')`,
		"two live claims of one resource": `SELECT count(*) <> count(DISTINCT (kind, deterministic_name))
			FROM lifecycle.resource_claim WHERE workspace_id = $1 AND released_at IS NULL AND orphaned_at IS NULL`,
		"a decommissioned workspace claims": `SELECT count(*) > 0 FROM lifecycle.resource_claim c
			JOIN lifecycle.workspace w ON w.id = c.workspace_id
			WHERE w.id = $1 AND w.state = 'decommissioned' AND c.released_at IS NULL AND c.orphaned_at IS NULL`,
		"an orphan names nobody": `SELECT count(*) > 0 FROM lifecycle.resource_claim
			WHERE workspace_id = $1 AND orphaned_at IS NOT NULL AND (orphaned_by = '' OR orphan_reason = '')`,
		"a clean failure claims": `SELECT count(*) > 0 FROM lifecycle.workspace w JOIN lifecycle.saga_run r ON r.id = w.run_id
			JOIN lifecycle.resource_claim c ON c.workspace_id = w.id
			WHERE w.id = $1 AND w.state = 'failed' AND c.released_at IS NULL AND c.orphaned_at IS NULL
				AND NOT (c.kind = 'schema' AND c.intent_at < r.created_at)
				AND NOT (r.phase = 'do' AND r.step_names[r.error_step + 1] = 'Mark active')`,
		"a stuck workspace does not say why": `SELECT count(*) > 0 FROM lifecycle.workspace w
			JOIN lifecycle.saga_run r ON r.id = w.run_id
			WHERE w.id = $1 AND w.state = 'stuck' AND (w.last_error = '' OR r.stuck_reason = '')`,
		"an open attempt of an ended run": `SELECT count(*) > 0 FROM lifecycle.saga_run r
			LEFT JOIN lifecycle.saga_step s ON s.run_id = r.id
			WHERE r.workspace_id = $1 AND r.state IN ('succeeded', 'failed', 'stuck')
			AND (s.state IN ('running', 'waiting') OR r.open_attempt > 0)`,
		"a run after a reset is archived": `SELECT count(*) > 0 FROM lifecycle.workspace w
			JOIN lifecycle.saga_run r ON r.workspace_id = w.id WHERE w.id = $1 AND w.reset_done AND r.archived_at IS NULL`,
		"an epoch below its run's": `SELECT count(*) > 0 FROM lifecycle.workspace w
			JOIN lifecycle.saga_run r ON r.workspace_id = w.id WHERE w.id = $1 AND r.epoch > w.epoch`,
	} {
		var broken bool
		if err := g.db.OwnerPool().QueryRow(ctx, sql, id).Scan(&broken); err != nil {
			return nil, fmt.Errorf("%s: %w", what, err)
		}
		if broken {
			out = append(out, what)
		}
	}
	now := history{}
	err := g.db.OwnerPool().QueryRow(ctx, `SELECT (SELECT count(*) FROM lifecycle.saga_run WHERE workspace_id = $1),
		(SELECT count(*) FROM lifecycle.saga_step WHERE workspace_id = $1), (SELECT count(*) FROM lifecycle.resource_claim
			WHERE workspace_id = $1)`, id).
		Scan(&now.runs, &now.attempts, &now.claims)
	if err != nil {
		return nil, err
	}
	if now.runs < before.runs || now.attempts < before.attempts || now.claims < before.claims {
		out = append(out, fmt.Sprintf("history was deleted: %+v, then %+v", *before, now))
	}
	released, err := g.claims(id, `released_at IS NOT NULL`)
	if err != nil {
		return nil, err
	}
	now.over = map[string]bool{}
	for _, c := range released {
		now.over[c.ID] = true
	}
	for c := range before.over {
		if !now.over[c] {
			out = append(out, "claim "+c+" was released and is not any more")
		}
	}
	*before = now
	g.world.mu.Lock()
	defer g.world.mu.Unlock()
	for _, o := range g.world.overlaps {
		if strings.Contains(o, id) {
			out = append(out, "two boxes stand: "+o)
		}
	}
	for k, n := range g.world.launches {
		if n != 1 {
			out = append(out, fmt.Sprintf("%s was launched %d times", k, n))
		}
	}
	slices.Sort(out)
	return out, nil
}

type claimed struct {
	ID, Kind, Name string
	Epoch          int64
	Confirmed      bool
	Orphan         bool
}

func (g *stage) claims(id, which string) ([]claimed, error) {
	rows, err := g.db.OwnerPool().Query(testkit.Context(g.t),
		`SELECT id::text, kind, deterministic_name, epoch, confirmed_at IS NOT NULL, orphaned_at IS NOT NULL
		FROM lifecycle.resource_claim WHERE workspace_id = $1 AND `+which, id)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowToStructByPos[claimed])
}

// earlierStorage reports whether another workspace of the tenant, which is decommissioned, still claims storage.
func (g *stage) earlierStorage(id string) (bool, error) {
	var out bool
	err := g.db.OwnerPool().QueryRow(testkit.Context(g.t),
		`SELECT EXISTS (SELECT FROM lifecycle.resource_claim c JOIN lifecycle.workspace w ON w.id = c.workspace_id
			JOIN lifecycle.workspace m ON m.tenant_id = w.tenant_id AND m.id <> w.id
		WHERE m.id = $1 AND w.state = 'decommissioned' AND c.kind = $2 AND c.released_at IS NULL)`,
		id, allocation.KindStorage).Scan(&out)
	return out, err
}

// disagrees compares the claims of a workspace on which nothing runs with the resources in the world and the workload
// database, and returns the differences.
func (g *stage) disagrees(id, tenant, name, machine string, stuck bool) ([]string, error) {
	claims, err := g.claims(id, `released_at IS NULL`)
	if err != nil {
		return nil, err
	}
	may, must := map[string]bool{}, map[string]bool{}
	for _, c := range claims {
		var thing string
		switch c.Kind {
		case allocation.KindInstance:
			if machine != "" {
				continue // the machine was there before
			}
			thing = "box " + c.Name
		case allocation.KindIdentity:
			thing = "identity " + c.Name
		case allocation.KindStorage:
			thing = "storage"
		case allocation.KindWorkload:
			thing = "workload " + c.Name
		case allocation.KindSchema:
			thing = "schema"
		default:
			continue
		}
		if may[thing] = true; c.Confirmed && !c.Orphan {
			must[thing] = true
		}
	}
	if machine != "" {
		// On the same machine are resources that a step of an earlier workspace may have left, and that were given up by
		// hand.
		earlier, err := g.earlierStorage(id)
		if err != nil {
			return nil, err
		}
		may["storage"] = may["storage"] || earlier
	}
	there := map[string]bool{}
	g.world.mu.Lock()
	for k, b := range g.world.instances {
		if (machine == "" || k != "machine:"+machine) && !strings.HasPrefix(k, id+":") || b.ended {
			continue
		}
		if machine == "" {
			there["box "+k] = true
			there["identity "+b.instance] = g.world.identities[b.instance] != ""
		}
		for _, thing := range b.things {
			there[thing] = true
		}
	}
	g.world.mu.Unlock()
	var stands bool
	err = g.workloads.QueryRow(testkit.Context(g.t), `SELECT EXISTS (SELECT 1 FROM pg_namespace WHERE nspname = $1)`,
		schema.Name(tenant, name, id)).Scan(&stands)
	if err != nil {
		return nil, err
	}
	there["schema"] = stands
	var out []string
	for thing, is := range there {
		if is && !may[thing] {
			out = append(out, thing+" is there and nobody claims it")
		}
	}
	for thing := range must {
		if !there[thing] && !stuck { // a stuck run may have removed it already
			out = append(out, thing+" is claimed and not there")
		}
	}
	slices.Sort(out)
	return out, nil
}
