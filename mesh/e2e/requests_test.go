package e2e_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/mesh/cluster"
)

// tenant of all requests.
const tenant = "acme"

func createTenant(t test, c *cluster.Cluster) {
	t.Helper()
	t.must("the tenant", 30*time.Second, func(ctx context.Context) error {
		_, err := c.Client.Command.CreateTenant(ctx, &readmodelv1.CreateTenantRequest{
			Name: tenant, Quota: &lifecyclev1.Quota{Workspaces: 1000, Gpus: 100, StorageBytes: 1 << 40},
		})
		return err
	})
}

// request is one requested workspace, as the client has recorded it.
type request struct {
	name   string
	key    string
	spec   *lifecyclev1.WorkspaceSpec
	doomed bool // its workload exits at once

	mu         sync.Mutex
	operation  string
	workspace  string
	calls      int
	answeredIn time.Duration
}

// doomedSpec ends failed: its only workload exits.
func doomedSpec() *lifecyclev1.WorkspaceSpec {
	return &lifecyclev1.WorkspaceSpec{Workloads: []*nodev1.Workload{{
		Name: "main", Command: []string{"/bin/false"}, RestartPolicy: nodev1.RestartPolicy_RESTART_POLICY_NEVER,
		Ports: []*nodev1.Port{{Name: "http"}}, Readiness: &nodev1.Readiness{HttpPath: "/"},
	}}}
}

// create repeats its request until it is answered, and then once more: the same key must get the same answer.
func (w *request) create(ctx context.Context, c *cluster.Cluster) error {
	began := time.Now()
	ask := func(ctx context.Context) error {
		w.mu.Lock()
		w.calls++
		w.mu.Unlock()
		resp, err := c.Client.Command.CreateWorkspace(ctx,
			&readmodelv1.CreateWorkspaceRequest{Tenant: tenant, Name: w.name, Spec: w.spec, IdempotencyKey: w.key})
		if err != nil {
			return err
		}
		op := resp.GetOperation()
		w.mu.Lock()
		defer w.mu.Unlock()
		if w.operation == "" {
			w.operation, w.workspace, w.answeredIn = op.GetOperationId(), op.GetWorkspaceId(), time.Since(began)
		}
		if w.operation != op.GetOperationId() || w.workspace != op.GetWorkspaceId() {
			return final{fmt.Errorf("%s was answered operation %s, then %s", w.name, w.operation, op.GetOperationId())}
		}
		return nil
	}
	for range 2 {
		if err := insistUnlessFinal(ctx, "an answer to the create of "+w.name, patience, ask); err != nil {
			return fmt.Errorf("create %s: %w", w.name, err)
		}
	}
	return nil
}

// final is an error that a repeated request would get again.
type final struct{ error }

func insistUnlessFinal(ctx context.Context, what string, limit time.Duration, do func(context.Context) error) error {
	var last error
	err := insist(ctx, what, limit, func(ctx context.Context) error {
		last = do(ctx)
		var f final
		if errors.As(last, &f) || fault.Has(last, commonv1.Reason_REASON_INVALID_ARGUMENT) ||
			fault.Has(last, commonv1.Reason_REASON_WORKSPACE_NAME_TAKEN) {
			return nil
		}
		return last
	})
	return errors.Join(err, last)
}

// createAll creates them all at once and waits for the answers.
func createAll(ctx context.Context, c *cluster.Cluster, requests []*request) error {
	var wg sync.WaitGroup
	errs := make([]error, len(requests))
	for i, w := range requests {
		wg.Go(func() { errs[i] = w.create(ctx, c) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// checkRequests checks that each request has exactly one workspace, by the operation that it was answered, and that
// only the doomed ones failed.
func checkRequests(t test, c *cluster.Cluster, requests []*request) {
	t.Helper()
	byName := map[string][]*readmodelv1.Workspace{}
	for _, ws := range workspaces(t, c) {
		byName[ws.GetName()] = append(byName[ws.GetName()], ws)
	}
	var slowest time.Duration
	calls := 0
	for _, w := range requests {
		got := byName[w.name]
		if len(got) != 1 || got[0].GetWorkspaceId() != w.workspace {
			t.Errorf("the request %s for workspace %s has %d workspaces: %v", w.name, w.workspace, len(got), got)
			continue
		}
		if !w.doomed && got[0].GetState() == commonv1.WorkspaceState_WORKSPACE_STATE_FAILED {
			t.Logf("%s failed: %s %s", w.name, got[0].GetLastErrorCode(), got[0].GetLastError())
		}
		if w.doomed && got[0].GetState() == commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE {
			t.Errorf("%s is active although its workload exits", w.name)
		}
		slowest = max(slowest, w.answeredIn)
		calls += w.calls
	}
	t.Logf("%d requests, %d calls, the slowest answer after %.1f s", len(requests), calls, slowest.Seconds())
}
