package e2e_test

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/mesh/agents"
	"github.com/gpuaas/mesh/mesh/cluster"
	"github.com/gpuaas/mesh/mesh/reap"
)

// computed are the kill points whose names are put together at run time, so that they are not found in the source.
var computed = []string{
	"lifecycle.saga.advance.before_commit", "lifecycle.saga.advance.after_commit",
	"lifecycle.saga.park.before_commit", "lifecycle.saga.park.after_commit",
	"lifecycle.saga.finish.before_commit", "lifecycle.saga.finish.after_commit",
}

// elsewhere are points that another test reaches.
var elsewhere = map[string]string{
	"recovery.report_challenge.before_commit": "only a copied identity is challenged: TestACopyIsFoundAcrossAKill",
	"recovery.renew.after_sign":               "certificates outlive this test: TestAnAgentSurvivesBetweenAnyTwoFsyncs",
	"recovery.renew.after_commit":             "as above",
	"recovery.renew.before_commit":            "as above",
	"nodeapi.renew.before_send":               "as above",
	"recovery.watchdog.before_request": "it asks for what is lost for good, of which there is none here: " +
		"TestTheWatchdogRecreatesOnceThoughItIsKilled",
	"recovery.watchdog.after_request":  "as above",
	"recovery.profile.phase":           "no profile changes here: TestAnActivationThatIsKilled of recovery/profiles",
	"recovery.profile.before_commit":   "as above",
	"recovery.profile.after_commit":    "as above",
	"recovery.rotation.after_prepare":  "a person asks for a rotation: TestTheNodeAuthorityRotatesUnderConnectedAgents",
	"recovery.rotation.after_announce": "as above",
	"recovery.rotation.before_sign":    "as above", "recovery.rotation.after_sign": "as above",
	"recovery.rotation.after_revoke": "as above", "recovery.rotation.after_retire": "as above",
}

// literals returns the kill points that stand in the source of a part of the tree.
func literals(t test, dir string) []string {
	t.Helper()
	out, err := exec.CommandContext(t.ctx, "grep", "-rhoE", "--include=*.go", "--exclude=*_test.go",
		`(failpoint\.Hit\(|\.point\(ctx, )"[a-z_.]+"`, filepath.Join("..", "..", dir)).Output()
	if err != nil {
		t.Fatal(err)
	}
	var points []string
	for _, m := range regexp.MustCompile(`\.(Hit|point)\((?:ctx, )?"([a-z_.]+)"`).FindAllStringSubmatch(string(out), -1) {
		point := m[2]
		if m[1] == "point" {
			point = "lifecycle.saga." + point
		}
		if _, ok := elsewhere[point]; !ok && !strings.HasSuffix(point, ".") {
			points = append(points, point)
		}
	}
	return points
}

// machines returns the ids of the enrolled machines by name.
func machines(t test, c *cluster.Cluster) map[string]string {
	t.Helper()
	out := map[string]string{}
	for _, a := range c.Nodes {
		t.must("node "+a.Name(), 30*time.Second, func(ctx context.Context) error {
			resp, err := c.Client.Query.GetNode(ctx, &readmodelv1.GetNodeRequest{Node: a.Name()})
			out[a.Name()] = resp.GetNode().GetNodeId()
			return err
		})
	}
	return out
}

// healed waits until every process is ready and every machine is connected under the id that it had.
func healed(t test, c *cluster.Cluster, before map[string]string) {
	t.Helper()
	began := time.Now()
	for _, p := range c.Processes() {
		t.want(p.Name+" to be ready", time.Minute, p.Ready)
	}
	for name, id := range before {
		t.want(name+" to be connected", time.Minute, func(ctx context.Context) error {
			resp, err := c.Client.Query.GetNode(ctx, &readmodelv1.GetNodeRequest{Node: name})
			if err != nil {
				return err
			}
			n := resp.GetNode()
			if n.GetNodeId() != id {
				return fmt.Errorf("node %s was %s and is %s", name, id, n.GetNodeId())
			}
			if !n.GetConnected() {
				return fmt.Errorf("node %s is not connected: %s", name, n.GetReason())
			}
			return nil
		})
	}
	t.Logf("healed: everything is ready and every machine connected after %.1f s", time.Since(began).Seconds())
}

// stir makes every kind of request other than creates, so that their kill points are passed too. The next round repeats
// a request that failed.
func stir(t test, c *cluster.Cluster, doomed func(i int)) func(context.Context) {
	t.Helper()
	return func(ctx context.Context) {
		bundled := ""
		for i := 0; app.Sleep(ctx, 400*time.Millisecond); i++ {
			call, cancel := context.WithTimeout(ctx, 4*time.Second)
			_, _ = c.Client.Command.ProbeNode(call, &readmodelv1.ProbeNodeRequest{Node: "n" + strconv.Itoa(1+i%len(c.Nodes))})
			_, _ = c.Client.Command.EnrollNode(call, &readmodelv1.EnrollNodeRequest{Name: "spare-" + strconv.Itoa(i%5)})
			if bundled == "" {
				shown, _ := c.Client.Query.GetNode(call, &readmodelv1.GetNodeRequest{Node: "n1"})
				bundled = shown.GetNode().GetNodeId()
			}
			_, _ = c.Client.Bundles.IssueBundle(call, &readmodelv1.IssueBundleRequest{NodeId: bundled, Reason: "stir"})
			_, _ = c.Client.Command.SetPolicy(call, &readmodelv1.SetPolicyRequest{
				Key: "audit.dedupe_window_seconds", Value: strconv.Itoa(100 + i%50), Reason: "stir",
			})
			for _, verb := range []recoveryv1.IdentityVerb{
				recoveryv1.IdentityVerb_IDENTITY_VERB_HOLD,
				recoveryv1.IdentityVerb_IDENTITY_VERB_REACTIVATE,
			} {
				_, _ = c.Client.Command.ChangeNodeIdentity(call,
					&readmodelv1.ChangeNodeIdentityRequest{Node: "n3", Verb: verb, Reason: "stir"})
			}
			cancel()
			if i%8 == 7 && i < 160 {
				doomed(i)
			}
		}
		// No node stays held by this test.
		_ = insist(context.WithoutCancel(ctx), "the last reactivation", time.Minute, func(ctx context.Context) error {
			_, err := c.Client.Command.ChangeNodeIdentity(ctx, &readmodelv1.ChangeNodeIdentityRequest{
				Node: "n3", Verb: recoveryv1.IdentityVerb_IDENTITY_VERB_REACTIVATE, Reason: "stir is over",
			})
			return err
		})
	}
}

// shape returns the spec of the n-th request: most get an instance, some a slot on a machine, some are doomed.
func shape(n int) (spec *lifecyclev1.WorkspaceSpec, doomed bool) {
	switch n % 10 {
	case 3:
		return &lifecyclev1.WorkspaceSpec{Placement: commonv1.PlacementDriver_PLACEMENT_DRIVER_STATIC}, false
	case 6:
		return doomedSpec(), true
	default:
		return nil, false
	}
}

func requests(prefix string, n int) []*request {
	var out []*request
	for i := range n {
		spec, doomed := shape(i)
		out = append(out, &request{
			name: fmt.Sprintf("%s-%02d", prefix, i), key: fmt.Sprintf("key-%s-%02d", prefix, i),
			spec: spec, doomed: doomed,
		})
	}
	return out
}

// TestKillsAtEveryPointBetweenTwoEffects kills each service at each of its kill points while workspaces are created,
// and machines' agents at theirs.
func TestKillsAtEveryPointBetweenTwoEffects(tt *testing.T) {
	t := within(tt, 12*time.Minute)
	c := start(t, cluster.Config{
		Nodes: 3, GPUs: 2,
		Policy: map[string]string{"node.task_stale_sweep_interval_seconds": "2"},
	})
	createTenant(t, c)
	before := machines(t, c)
	want := slices.Concat(literals(t, "services"), computed)
	if len(want) < 30 {
		t.Fatalf("only %d kill points are found in the source", len(want))
	}
	killed := map[int]bool{}
	for _, p := range c.Processes() {
		p.BeforeStart(func() []string {
			return []string{
				"GPUAAS_FAILPOINTS=" + p.Service + ".*=kill",
				"GPUAAS_BOX_FAILPOINTS=agent.deliver.*=kill,agent.result.*=kill,agent.run.*=kill",
			}
		})
		killed[p.PID()] = true
		if err := p.Kill9(); err != nil {
			t.Fatal(err)
		}
	}
	var doomedMu sync.Mutex
	var extra []*request
	var group sync.WaitGroup
	ctx := t.ctx
	measured, stop := watched(t, c, stir(t, c, func(i int) {
		w := &request{
			name: fmt.Sprintf("doomed-%03d", i), key: fmt.Sprintf("doomed-%03d", i), spec: doomedSpec(),
			doomed: true,
		}
		doomedMu.Lock()
		extra = append(extra, w)
		doomedMu.Unlock()
		group.Go(func() {
			if err := w.create(ctx, c); err != nil {
				t.Error(err)
			}
		})
	}))
	began := time.Now()
	var all []*request
	missing := func() []string {
		points, _ := hits(t, c)
		return slices.DeleteFunc(slices.Clone(want), func(p string) bool { return points[p] > 0 })
	}
	for round := 0; round < 4 && (round < 2 || len(missing()) > 0); round++ {
		batch := requests(fmt.Sprintf("r%d", round), 8)
		all = append(all, batch...)
		if err := createAll(ctx, c, batch); err != nil {
			t.Error(err)
		}
		// The rare requests of this test hold and reactivate the machines, and an agent that was held comes back at its slow
		// cadence.
		awaitRest(t, c, 4*time.Minute, batch...)
		t.Logf("round %d: %d points are to be hit after %.0f s", round, len(missing()), time.Since(began).Seconds())
	}
	// Points that only a rare request passes get a little longer.
	_ = insist(ctx, "the points of rare requests", 2*time.Minute, func(context.Context) error {
		if left := missing(); len(left) > 0 {
			return fmt.Errorf("%v", left)
		}
		return nil
	})
	stop()
	group.Wait()
	all = append(all, extra...)
	for _, p := range c.Processes() {
		p.BeforeStart(nil)
	}
	healed(t, c, before)
	t.Logf("settled: %v", awaitRest(t, c, time.Minute))
	points, _ := hits(t, c)
	for _, name := range slices.Sorted(maps.Keys(points)) {
		t.Logf("killed at %-45s %d", name, points[name])
	}
	if left := missing(); len(left) > 0 {
		t.Errorf("%d of %d kill points were not hit: %v", len(left), len(want), left)
	}
	quiet(t, c)
	measured.check(t, 5)
	checkRequests(t, c, all)
	checkWorld(t, c)
	checkLogs(t, c, killed)
}

// quiet waits until no task is open: the tasks of a node without a session expire, and of one that was dispatched it is
// unknown whether it ran until its time to run has passed too. The list of current tasks does not have these.
func quiet(t test, c *cluster.Cluster) {
	t.Helper()
	mesh := database(t, c, pg.DatabaseMesh)
	t.want("the last task to end", 3*time.Minute, func(context.Context) error {
		if open := column(t, mesh, tasksInFlight); len(open) > 0 {
			return fmt.Errorf("%d tasks are in flight, such as %s", len(open), open[0])
		}
		return nil
	})
}

// TestKillsAtRandom kills anything at any time during 20 creates at once, or 50 in a long run.
func TestKillsAtRandom(tt *testing.T) {
	t := within(tt, 12*time.Minute)
	seed := uint64(time.Now().UnixNano()) // any number will do
	if s := os.Getenv("GPUAAS_E2E_SEED"); s != "" {
		var err error
		if seed, err = strconv.ParseUint(s, 10, 64); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("seed %d; again with GPUAAS_E2E_SEED=%d", seed, seed)
	random := rand.New(rand.NewPCG(seed, 1))
	c := start(t, cluster.Config{
		Nodes: 3, GPUs: 2,
		Policy: map[string]string{"node.task_stale_sweep_interval_seconds": "2"},
	})
	createTenant(t, c)
	before := machines(t, c)
	killed, tally := map[int]bool{}, map[string]int{}
	var kills atomic.Int32
	measured, stop := watched(t, c, func(ctx context.Context) {
		for app.Sleep(ctx, time.Duration(300+random.IntN(900))*time.Millisecond) {
			name, pid := victim(c, random)
			if pid == 0 {
				continue
			}
			killed[pid] = true
			tally[name]++
			kills.Add(1)
			_ = syscall.Kill(pid, syscall.SIGKILL) // it may be gone
		}
	})
	all := requests("w", testkit.Repeat(20, 50))
	began := time.Now()
	ctx := t.ctx
	if err := createAll(ctx, c, all); err != nil {
		t.Error(err)
	}
	t.Logf("all creates are answered after %.1f s", time.Since(began).Seconds())
	// The killing goes on while sagas run, for as long as some are open, but not for ever; and until there was enough of
	// it.
	for (kills.Load() < enough || time.Since(began) < testkit.Repeat(20*time.Second, time.Minute)) &&
		app.Sleep(ctx, 500*time.Millisecond) {
		open := kills.Load() < enough
		for _, ws := range workspaces(t, c) {
			open = open || !atRest(ws.GetState())
		}
		if !open {
			break
		}
	}
	stop()
	t.Logf("killed: %v", tally)
	heal := time.Now()
	healed(t, c, before)
	t.Logf("settled: %v, %.1f s after the last kill", awaitRest(t, c, 2*time.Minute), time.Since(heal).Seconds())
	quiet(t, c)
	measured.check(t, 0)
	checkRequests(t, c, all)
	checkWorld(t, c)
	checkLogs(t, c, killed)
}

// enough is the least number of kills in a run of TestKillsAtRandom.
const enough = 10

// victim chooses a process.
func victim(c *cluster.Cluster, random *rand.Rand) (string, int) {
	services := c.Processes()
	switch n := random.IntN(len(services) + 4); {
	case n < len(services):
		return services[n].Name, services[n].PID()
	case n == len(services):
		return "postgres", c.Stores.Postgres.PID()
	case n == len(services)+1:
		return "redis", c.Stores.Redis.PID()
	case n == len(services)+2:
		a := c.Nodes[random.IntN(len(c.Nodes))]
		return a.Name(), a.PID()
	default:
		procs, err := reap.Under(c.Plan.InstanceDir, agents.Program)
		if err != nil {
			return "", 0
		}
		procs = slices.DeleteFunc(procs, func(p reap.Process) bool { return len(p.Args) < 2 || p.Args[1] != "run" })
		if len(procs) == 0 {
			return "", 0
		}
		slices.SortFunc(procs, func(a, b reap.Process) int { return a.PID - b.PID })
		return "box", procs[random.IntN(len(procs))].PID
	}
}
