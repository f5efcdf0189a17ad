package e2e_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/mesh/agents"
	"github.com/gpuaas/mesh/mesh/cluster"
)

// TestAWipedMachineGetsItsWorkspacesBack wipes a shared machine but for its identity, as a machine whose data disk was
// replaced. What it had is recreated there without a person, once. An agent whose state is removed while its workloads
// run does not report them as gone (agent).
func TestAWipedMachineGetsItsWorkspacesBack(tt *testing.T) {
	t := beside(tt, 10*time.Minute)
	c := start(t, cluster.Config{
		Nodes: 1, Env: []string{"GPUAAS_LIFECYCLE_FINDING_SWEEP=1s", "GPUAAS_LIFECYCLE_FINDING_GRACE=1s"},
	})
	machines(t, c)
	createTenant(t, c)
	w := &request{
		name: "kept", key: ids.New(),
		spec: &lifecyclev1.WorkspaceSpec{Placement: commonv1.PlacementDriver_PLACEMENT_DRIVER_STATIC},
	}
	if err := createAll(t.ctx, c, []*request{w}); err != nil {
		t.Fatal(err)
	}
	awaitActive(t, c, w, 1)
	machine := c.Nodes[0]
	if err := machine.Stop(t.ctx); err != nil {
		t.Fatal(err)
	}
	// Its disk is replaced while it is off: nothing of what ran on it runs any more.
	if _, err := agents.End(t.ctx, filepath.Join(filepath.Dir(c.Plan.InstanceDir), "agents"), time.Second); err != nil {
		t.Fatal(err)
	}
	wiped, err := wipe(filepath.Join(filepath.Dir(c.Plan.InstanceDir), "agents", machine.Name(), "state"))
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("wiped: %s", strings.Join(wiped, ", "))
	began := time.Now()
	if err := machine.Start(); err != nil {
		t.Fatal(err)
	}
	awaitActive(t, c, w, 2)
	t.Logf("recreated %.1f s after the machine came back", time.Since(began).Seconds())
	t.must("the recovery to be over", 3*time.Minute, func(ctx context.Context) error {
		resp, err := c.Client.Incidents.ListRecoveries(ctx, &readmodelv1.ListRecoveriesRequest{Workspace: w.workspace})
		if err != nil {
			return err
		}
		list := resp.GetItems()
		if len(list) != 1 || list[0].GetEndedAt() == nil {
			return fmt.Errorf("recoveries: %v", list)
		}
		if r := list[0]; names.Of(r.GetTrigger()) != "node_emptied" || names.Of(r.GetOutcome()) != "recovered" ||
			r.GetAttempts() != 1 {
			t.Errorf("the record of the recovery is %v", r)
		}
		return nil
	})
	awaitRest(t, c, 2*time.Minute)
	got := column(t, database(t, c, pg.DatabaseMesh),
		`SELECT concat_ws(' ', kind, state, epoch, requester) FROM lifecycle.saga_run ORDER BY created_at`)
	if len(got) != 2 || !strings.HasPrefix(got[0], "create succeeded 1 ") ||
		!strings.HasPrefix(got[1], "recreate succeeded 2 auto_recovery:") {
		t.Errorf("operations: %q", got)
	}
	checkWorld(t, c)
}

// kept are the files in the state directory of an agent that make it the node that it is.
var kept = []string{"node.json", "join-state.json", "service-roots.json"}

// wipe removes all other files and directories, and returns their names.
func wipe(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	var out []string
	for _, e := range entries {
		if slices.Contains(kept, e.Name()) {
			continue
		}
		out = append(out, e.Name())
		err = errors.Join(err, os.RemoveAll(filepath.Join(dir, e.Name())))
	}
	return out, err
}
