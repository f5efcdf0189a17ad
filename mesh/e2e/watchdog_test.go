package e2e_test

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/mesh/cluster"
)

// watchdogPoints lie about the one request by which the watchdog acts: it is recorded and not sent, and sent with its
// answer not yet recorded.
var watchdogPoints = []string{"recovery.watchdog.before_request", "recovery.watchdog.after_request"}

// TestTheWatchdogRecreatesOnceThoughItIsKilled takes the instance of a workspace away for good and kills the watchdog
// on both sides of its request. Another replica, or the same one started anew, must complete the recovery, and the
// workspace must be recreated once.
func TestTheWatchdogRecreatesOnceThoughItIsKilled(tt *testing.T) {
	t := beside(tt, 12*time.Minute)
	c := start(t, cluster.Config{Policy: map[string]string{"node.heartbeat_stale_after_seconds": "10"}})
	createTenant(t, c)
	w := &request{name: "lost", key: "lost"}
	if err := createAll(t.ctx, c, []*request{w}); err != nil {
		t.Fatal(err)
	}
	awaitActive(t, c, w, 1)
	killed := map[int]bool{}
	armWatchdogs(t, c, killed)

	// The agent dies, and the agent of the instance that is powered on again is turned away: only a new instance can bring
	// the workspace back while connections are refused.
	shutOut := func(shut bool) (refused int64) {
		refused, err := c.ShutOut(c.Plan.Addresses.Agents, shut)
		if err != nil {
			t.Fatal(err)
		}
		return refused
	}
	shutOut(true)
	agent, _, _ := below(t, filepath.Join(c.Plan.InstanceDir, "boxes", w.workspace+"-1"))
	if len(agent) != 1 {
		t.Fatalf("the box has %d agents", len(agent))
	}
	if err := syscall.Kill(agent[0].PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	gone := time.Now()
	for _, point := range watchdogPoints {
		t.must("the watchdog to die at "+point, 4*time.Minute, func(context.Context) error {
			if points, _ := hits(t, c); points[point] == 0 {
				return fmt.Errorf("killed so far: %v", points)
			}
			return nil
		})
		t.Logf("killed at %s %.1f s after the box", point, time.Since(gone).Seconds())
	}
	t.Logf("turned away meanwhile: %d connections", shutOut(false))
	awaitActive(t, c, w, 2)
	t.Logf("recreated %.1f s after the box was gone", time.Since(gone).Seconds())
	for _, p := range c.Recovery {
		p.BeforeStart(nil)
	}
	checkRecovery(t, c, w)
	awaitRest(t, c, 2*time.Minute)
	quiet(t, c)
	if launched, _ := checkLedger(t, c); launched != 2 {
		t.Errorf("%d boxes were launched for two epochs of one workspace", launched)
	}
	checkRequests(t, c, []*request{w})
	checkWorld(t, c)
	checkLogs(t, c, killed)
}

// armWatchdogs starts every replica of recovery anew, to be killed at each of the points once: the first replica that
// reaches it.
func armWatchdogs(t test, c *cluster.Cluster, killed map[int]bool) {
	t.Helper()
	for _, p := range c.Recovery {
		p.BeforeStart(func() []string {
			return []string{"GPUAAS_FAILPOINTS=" + strings.Join(watchdogPoints, "*=kill,") + "*=kill"}
		})
		pid := p.PID()
		killed[pid] = true
		if err := p.Kill9(); err != nil {
			t.Fatal(err)
		}
		t.must(p.Name+" to be started anew", time.Minute, func(ctx context.Context) error {
			if p.PID() == pid {
				return fmt.Errorf("%s is not started yet", p.Name)
			}
			return p.Ready(ctx)
		})
	}
}

// awaitActive waits until a workspace is active in an epoch.
func awaitActive(t test, c *cluster.Cluster, w *request, epoch int64) {
	t.Helper()
	t.must(fmt.Sprintf("%s to be active in epoch %d", w.name, epoch), 4*time.Minute, func(ctx context.Context) error {
		resp, err := c.Client.Query.GetWorkspace(ctx, &readmodelv1.GetWorkspaceRequest{Workspace: w.workspace})
		if err != nil {
			return err
		}
		ws := resp.GetWorkspace()
		if ws.GetState() != commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE || ws.GetEpoch() != epoch {
			return fmt.Errorf("it is %s in epoch %d: %s", names.Of(ws.GetState()), ws.GetEpoch(), ws.GetWhyWaiting())
		}
		return nil
	})
}

// checkRecovery checks that one recovery was recorded and is over, that it took one operation and one token of each
// budget, and that the watchdog made no other request.
func checkRecovery(t test, c *cluster.Cluster, w *request) {
	t.Helper()
	t.must("the recovery to be over", 3*time.Minute, func(ctx context.Context) error {
		resp, err := c.Client.Incidents.ListRecoveries(ctx, &readmodelv1.ListRecoveriesRequest{Workspace: w.workspace})
		if err != nil {
			return err
		}
		list := resp.GetItems()
		if len(list) != 1 || list[0].GetEndedAt() == nil {
			return fmt.Errorf("recoveries: %v", list)
		}
		r := list[0]
		if r.GetTrigger() != commonv1.RecoveryTrigger_RECOVERY_TRIGGER_SESSION_LOST ||
			r.GetOutcome() != commonv1.RecoveryOutcome_RECOVERY_OUTCOME_RECOVERED ||
			r.GetAttempts() != 1 || r.GetWhatWorked() != "recreate" {
			t.Errorf("the record of the recovery is %v", r)
		}
		t.Logf("recovery: %s, %s after %.1f s, %d attempt", names.Of(r.GetTrigger()), names.Of(r.GetOutcome()),
			r.GetTotalSeconds(), r.GetAttempts())
		return nil
	})
	mesh := database(t, c, pg.DatabaseMesh)
	is := func(what, sql string, want ...string) {
		t.Helper()
		if got := column(t, mesh, sql); !slices.Equal(got, want) {
			t.Errorf("%s: %v, want %v", what, got, want)
		}
	}
	is("records", `SELECT concat_ws(' ', asked, answered, attempts, outcome) FROM recovery.recovery_record`,
		"1 1 1 recovered")
	is("operations", `SELECT concat_ws(' ', kind, state, epoch) FROM lifecycle.saga_run ORDER BY created_at`,
		"create succeeded 1", "recreate succeeded 2")
	is("operations by the watchdog", `SELECT kind FROM lifecycle.saga_run WHERE requester LIKE 'watchdog%'`, "recreate")
	// A budget of four was full before the first recreation, and nothing was given back.
	is("budgets", `SELECT concat_ws(' ', scope, tokens) FROM recovery.churn_bucket ORDER BY scope`, "placement 3",
		"workspace 3")
}
