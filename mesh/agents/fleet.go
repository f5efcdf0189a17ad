package agents

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/mesh/person"
)

// Enrol obtains a token, as any operator would, for each agent that has no identity yet.
func Enrol(ctx context.Context, client *person.Client, list []*Agent) error {
	var wg sync.WaitGroup
	errs := make([]error, len(list))
	for i, a := range list {
		if !a.NeedsToken() {
			continue
		}
		wg.Go(func() {
			resp, err := client.Command.EnrollNode(ctx, &readmodelv1.EnrollNodeRequest{Name: a.Name()})
			if err != nil {
				errs[i] = fmt.Errorf("obtain a token for node %s: %w", a.Name(), err)
				return
			}
			errs[i] = a.Furnish(resp.GetToken())
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// Await waits until all agents are connected according to the API, at most for limit, and returns how many are. Fewer
// than all is no error.
func Await(ctx context.Context, client *person.Client, list []*Agent, limit time.Duration) (int, error) {
	wanted := map[string]bool{}
	for _, a := range list {
		wanted[a.Name()] = true
	}
	deadline := time.Now().Add(limit)
	for {
		connected, err := connected(ctx, client, wanted)
		if err == nil && connected == len(wanted) {
			return connected, nil
		}
		if time.Now().After(deadline) {
			if err != nil {
				return connected, fmt.Errorf("list nodes: %w", err)
			}
			return connected, nil
		}
		if !app.Sleep(ctx, 20*time.Millisecond) {
			return connected, context.Cause(ctx)
		}
	}
}

func connected(ctx context.Context, client *person.Client, wanted map[string]bool) (int, error) {
	if len(wanted) == 0 {
		return 0, nil
	}
	n, token := 0, ""
	for {
		resp, err := client.Query.ListNodes(ctx,
			&readmodelv1.ListNodesRequest{ConnectedOnly: true, PageSize: 1000, PageToken: token})
		if err != nil {
			return n, err
		}
		for _, node := range resp.GetItems() {
			if node.GetConnected() && wanted[node.GetName()] {
				n++
			}
		}
		if token = resp.GetNextPageToken(); token == "" {
			return n, nil
		}
	}
}
