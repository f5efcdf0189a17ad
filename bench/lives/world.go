package lives

import (
	"context"
	"fmt"
	"sync/atomic"

	"golang.org/x/sync/errgroup"

	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/mesh/person"
)

const tenantName = "lives"

// world makes lives of workspaces as a person would.
type world struct {
	o      Options
	client *person.Client
	number atomic.Int64
}

func (w *world) tenant(ctx context.Context) error {
	if _, err := w.client.Command.CreateTenant(ctx, &readmodelv1.CreateTenantRequest{Name: tenantName}); err != nil {
		return fmt.Errorf("create the tenant: %w", err)
	}
	return nil
}

// many makes n lives, as many at once as the options say.
func (w *world) many(ctx context.Context, n int) error {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(w.o.Clients)
	for range n {
		if ctx.Err() != nil {
			break
		}
		group.Go(func() error { return w.one(ctx, fmt.Sprintf("w-%08d", w.number.Add(1))) })
	}
	return group.Wait()
}

// one creates a workspace, recreates it and decommissions it.
func (w *world) one(ctx context.Context, name string) error {
	ws, err := w.client.Provision(ctx, tenantName, name, w.o.Placement)
	if err != nil {
		return err
	}
	return w.client.RecreateAndEnd(ctx, ws, "bench")
}
