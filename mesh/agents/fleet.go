package agents

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/mesh/person"
)

// Enrol calls Enrol of each agent, and returns those that connect only after a person has decided something.
func Enrol(ctx context.Context, client *person.Client, list []*Agent) ([]Absent, error) {
	var wg sync.WaitGroup
	found, errs := make([]*Absent, len(list)), make([]error, len(list))
	for i, a := range list {
		wg.Go(func() { found[i], errs[i] = a.Enrol(ctx, client) })
	}
	wg.Wait()
	var absent []Absent
	for _, a := range found {
		if a != nil {
			absent = append(absent, *a)
		}
	}
	return absent, errors.Join(errs...)
}

// Without returns the agents of a list that are not among the absent.
func Without(list []*Agent, absent []Absent) []*Agent {
	return slices.DeleteFunc(slices.Clone(list), func(a *Agent) bool {
		return slices.ContainsFunc(absent, func(other Absent) bool { return other.Name == a.Name() })
	})
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
