package e2e_test

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/mesh/cluster"
)

// TestAnInstanceThatNeverConnectsIsReplacedByTheWatchdog turns the agent of a new workspace's instance away until its
// step has stalled and the watchdog has made its request. The operation that waited for it is cancelled, the instance
// is confirmed ended, and the next one, which is let in, brings the workspace up: one recovery, one launch for each
// epoch.
func TestAnInstanceThatNeverConnectsIsReplacedByTheWatchdog(tt *testing.T) {
	t := beside(tt, 12*time.Minute)
	c := start(t, cluster.Config{Policy: map[string]string{
		"node.heartbeat_stale_after_seconds": "10",
		"saga.step_stall_seconds":            "45",
	}})
	createTenant(t, c)
	if _, err := c.ShutOut(c.Plan.Addresses.Agents, true); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	w := &request{name: "absent", key: "absent"}
	if err := createAll(t.ctx, c, []*request{w}); err != nil {
		t.Fatal(err)
	}
	read := func(ctx context.Context) (*readmodelv1.Workspace, error) {
		resp, err := c.Client.Query.GetWorkspace(ctx, &readmodelv1.GetWorkspaceRequest{Workspace: w.workspace})
		return resp.GetWorkspace(), err
	}
	t.must("the stall to be seen", 4*time.Minute, func(ctx context.Context) error {
		ws, err := read(ctx)
		if err == nil && ws.GetEpoch() == 1 &&
			(!ws.GetStalled() || ws.GetUserState() != commonv1.UserState_USER_STATE_TEMPORARY) {
			err = fmt.Errorf("it is %s, stalled %v, at %q: %s", names.Of(ws.GetUserState()), ws.GetStalled(),
				ws.GetCurrentStep(), ws.GetWhyWaiting())
		}
		return err
	})
	t.must("another epoch to begin", 4*time.Minute, func(ctx context.Context) error {
		ws, err := read(ctx)
		if err == nil && ws.GetEpoch() != 2 {
			err = fmt.Errorf("it is %s in epoch %d, at %q: %s", names.Of(ws.GetState()), ws.GetEpoch(), ws.GetCurrentStep(),
				ws.GetWhyWaiting())
		}
		return err
	})
	turned, err := c.ShutOut(c.Plan.Addresses.Agents, false)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("replaced %.1f s after it was asked for; %d connections were turned away", time.Since(began).Seconds(), turned)
	awaitActive(t, c, w, 2)
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
		if r.GetTrigger() != commonv1.RecoveryTrigger_RECOVERY_TRIGGER_STALLED ||
			r.GetOutcome() != commonv1.RecoveryOutcome_RECOVERY_OUTCOME_RECOVERED ||
			r.GetAttempts() != 1 || r.GetWhatWorked() != "recreate" {
			t.Errorf("the record of the recovery is %v", r)
		}
		t.Logf("recovery: %s, %s after %.1f s", names.Of(r.GetTrigger()), names.Of(r.GetOutcome()), r.GetTotalSeconds())
		return nil
	})
	mesh := database(t, c, pg.DatabaseMesh)
	for _, is := range []struct {
		what, sql string
		want      []string
	}{
		{
			"operations", `SELECT concat_ws(' ', kind, state, epoch) FROM lifecycle.saga_run ORDER BY created_at`,
			[]string{"create failed 1", "recreate succeeded 2"},
		},
		{
			"cancelled by", `SELECT cancel_by FROM lifecycle.saga_run WHERE kind = 'create'`,
			[]string{"watchdog:service/recovery"},
		},
		{
			"boxes", `SELECT concat_ws(' ', epoch, state) FROM lifecycle.instance ORDER BY epoch`,
			[]string{"1 ended", "2 live"},
		},
		{"order", `SELECT (a.ended_at < b.started_at)::text FROM lifecycle.instance a JOIN lifecycle.instance b ON b.epoch = 2
			WHERE a.epoch = 1`, []string{"true"}},
		{
			"budgets", `SELECT concat_ws(' ', scope, tokens) FROM recovery.churn_bucket ORDER BY scope`,
			[]string{"placement 3", "workspace 3"},
		},
	} {
		if got := column(t, mesh, is.sql); !slices.Equal(got, is.want) {
			t.Errorf("%s: %v, want %v", is.what, got, is.want)
		}
	}
	awaitRest(t, c, 2*time.Minute)
	quiet(t, c)
	if launched, _ := checkLedger(t, c); launched != 2 {
		t.Errorf("%d boxes were launched for two epochs of one workspace", launched)
	}
	checkRequests(t, c, []*request{w})
	checkWorld(t, c)
	checkLogs(t, c, nil)
}
