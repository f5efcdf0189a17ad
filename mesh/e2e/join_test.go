package e2e_test

import (
	"context"
	"fmt"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/mesh/cluster"
)

// TestAHundredCreatesOfOneNameAreOneOperation checks single-flight, and that the loss of the lock store costs latency
// only.
func TestAHundredCreatesOfOneNameAreOneOperation(tt *testing.T) {
	t := beside(tt, 8*time.Minute)
	ctx := t.ctx
	c := start(t, cluster.Config{})
	createTenant(t, c)
	options, err := redis.ParseURL(c.Stores.Redis.URL())
	if err != nil {
		t.Fatal(err)
	}
	client := redis.NewClient(options)
	t.Cleanup(func() { _ = client.Close() })
	killed := map[int]bool{}
	for _, tc := range []struct {
		name    string
		disturb func() error
		mend    func() error
	}{
		{name: "undisturbed"},
		{name: "flushed", disturb: func() error { return client.FlushAll(ctx).Err() }},
		{
			name:    "stopped",
			disturb: func() error { return syscall.Kill(c.Stores.Redis.PID(), syscall.SIGSTOP) },
			mend:    func() error { return syscall.Kill(c.Stores.Redis.PID(), syscall.SIGCONT) },
		},
		{name: "killed", disturb: func() error { return syscall.Kill(c.Stores.Redis.PID(), syscall.SIGKILL) }},
	} {
		t.run(tc.name, func(t test) { joinOne(t, c, "one-"+tc.name, tc.disturb, tc.mend) })
	}
	awaitRest(t, c, time.Minute)
	if launched, _ := checkLedger(t, c); launched != 4 {
		t.Errorf("%d boxes were launched for 4 workspaces", launched)
	}
	checkWorld(t, c)
	checkLogs(t, c, killed)
}

func joinOne(t test, c *cluster.Cluster, name string, disturb, mend func() error) {
	t.Helper()
	const callers = 100
	ctx := t.ctx
	type answer struct {
		op  *lifecyclev1.Operation
		err error
	}
	answered := make(chan answer, callers)
	begin, half := make(chan struct{}), make(chan struct{})
	var once sync.Once
	var wg sync.WaitGroup
	for i := range callers {
		wg.Go(func() {
			<-begin
			if i >= callers/2 { // the second half comes while the store is disturbed
				<-half
			}
			resp, err := c.Client.Command.CreateWorkspace(ctx, &readmodelv1.CreateWorkspaceRequest{Tenant: tenant, Name: name})
			answered <- answer{resp.GetOperation(), err}
			once.Do(func() {
				if disturb != nil {
					if err := disturb(); err != nil {
						t.Errorf("disturb the lock store: %v", err)
					}
				}
				close(half)
			})
		})
	}
	// The create stays open until all requests have come: its machine is turned away until then.
	letIn := func(in bool) {
		if _, err := c.ShutOut(c.Plan.Addresses.Agents, !in); err != nil {
			t.Fatal(err)
		}
	}
	letIn(false)
	began := time.Now()
	close(begin)
	wg.Wait()
	took := time.Since(began)
	letIn(true)
	if mend != nil {
		if err := mend(); err != nil {
			t.Error(err)
		}
	}
	close(answered)
	operations, joined, first := map[string]int{}, 0, 0
	for a := range answered {
		if a.err != nil {
			t.Errorf("create: %v", a.err)
			continue
		}
		operations[a.op.GetOperationId()]++
		if a.op.GetJoined() {
			joined++
		} else {
			first++
		}
	}
	if len(operations) != 1 || first != 1 || joined != callers-1 {
		t.Errorf("%d operations, %d first, %d joined", len(operations), first, joined)
	}
	_, err := c.Client.Command.CreateWorkspace(ctx,
		&readmodelv1.CreateWorkspaceRequest{Tenant: tenant, Name: name, Spec: &lifecyclev1.WorkspaceSpec{Gpus: 1}})
	if !fault.Has(err, commonv1.Reason_REASON_WORKSPACE_NAME_TAKEN) {
		t.Errorf("another spec is answered %v", err)
	}
	t.want(name+" to be active", time.Minute, func(ctx context.Context) error {
		resp, err := c.Client.Query.GetWorkspace(ctx, &readmodelv1.GetWorkspaceRequest{Workspace: tenant + "/" + name})
		if err != nil {
			return err
		}
		if s := resp.GetWorkspace().GetState(); s != commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE {
			return fmt.Errorf("the workspace is %s", s)
		}
		return nil
	})
	t.Logf("%d creates: %d operation, %d joined, all answered within %.2f s", callers, len(operations), joined,
		took.Seconds())
}
