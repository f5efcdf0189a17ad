package operation

import (
	"fmt"
	"maps"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/testkit"
)

// canary is an environment value that occurs nowhere else.
const canary = "ENVCANARY-91be"

// withEnv returns a request for a workspace with one workload that has an environment.
func withEnv(tenant, name, key string, env map[string]string) *lifecyclev1.RequestOperationRequest {
	return &lifecyclev1.RequestOperationRequest{
		Kind: commonv1.OperationKind_OPERATION_KIND_CREATE, IdempotencyKey: key,
		Target: &lifecyclev1.RequestOperationRequest_Create{Create: &lifecyclev1.CreateWorkspace{
			Tenant: tenant, Name: name, Spec: &lifecyclev1.WorkspaceSpec{
				Placement: commonv1.PlacementDriver_PLACEMENT_DRIVER_PROCESS,
				Workloads: []*nodev1.Workload{{Name: "main", Command: []string{"serve"}, Env: env}},
			},
		}},
	}
}

// TestEnvironmentValuesAreNowhereInTheDatabase searches every table while the task that deploys is on its way, and
// again at the end. The agents get the values, at the first deploy and at that of the next epoch.
func TestEnvironmentValuesAreNowhereInTheDatabase(t *testing.T) {
	p := newCluster(t, clusterConfig{seats: 1, lease: 5 * time.Second})
	env := map[string]string{"FOO": canary, "EMPTY": ""}
	var mu sync.Mutex
	deploys := 0
	p.world.mu.Lock()
	p.world.deployed = func(d *nodev1.WorkloadDeploy) {
		mu.Lock()
		defer mu.Unlock()
		deploys++
		if !maps.Equal(d.GetWorkload().GetEnv(), env) || len(d.GetWorkload().GetSealedEnv())+len(d.GetSealedSecretEnv()) > 0 {
			t.Errorf("the agent was given %v", d.GetWorkload())
		}
		url := d.GetSecretEnv()["DATABASE_URL"]
		cfg, err := pgx.ParseConfig(url)
		if err != nil || cfg.Password == "" {
			t.Errorf("the agent was given the database %q: %v", url, err)
			return
		}
		for _, secret := range []string{canary, cfg.Password} {
			if found := testkit.Mentions(t, p.db.AdminURL(), secret); len(found) > 0 {
				t.Errorf("during the deploy %q stands in %v", secret, found)
			}
		}
	}
	p.world.mu.Unlock()
	tenant := p.tenant()
	op, err := p.seats[0].server.RequestOperation(t.Context(), withEnv(tenant, "demo", "key-1", env))
	if err != nil {
		t.Fatal(err)
	}
	id := op.GetOperation().GetWorkspaceId()
	p.rests(id, "active")
	if _, err := p.seats[0].ask(t.Context(), kRecreate, id); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, testkit.Patience, func() error {
		if w := p.workspace(id); w.Epoch != 2 || w.State != "active" {
			return fmt.Errorf("the workspace is %s in epoch %d", w.State, w.Epoch)
		}
		return nil
	})
	if found := testkit.Mentions(t, p.db.AdminURL(), canary); len(found) > 0 {
		t.Errorf("the value stands in %v", found)
	}
	if found := testkit.Mentions(t, p.db.AdminURL(), "FOO"); len(found) == 0 {
		t.Error("the search finds nothing at all")
	}
	mu.Lock()
	defer mu.Unlock()
	if deploys < 2 {
		t.Errorf("%d deploys reached an agent, want one in each epoch", deploys)
	}
}
