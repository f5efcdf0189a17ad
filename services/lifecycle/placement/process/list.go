package process

import (
	"context"
	"fmt"
	"iter"

	"github.com/gpuaas/mesh/services/lifecycle/placement"
)

// List returns everything that was ever launched.
func (d *Driver) List(ctx context.Context) ([]placement.Instance, error) {
	return d.list(ctx, (*content).each)
}

// Standing returns the instances that have not ended, and those in which processes were found after their end.
func (d *Driver) Standing(ctx context.Context) ([]placement.Instance, error) {
	return d.list(ctx, (*content).noticed)
}

func (d *Driver) list(ctx context.Context, of func(*content) iter.Seq2[instanceKey, *instance]) ([]placement.Instance,
	error,
) {
	var out []placement.Instance
	err := d.launchLog.with(ctx, func(l *content, _ func(entry) error) error {
		for k, b := range of(l) {
			if b.launchedAt.IsZero() && b.Op == opEnded {
				continue // ended before it was launched
			}
			out = append(out, placement.Instance{
				WorkspaceID: k.workspaceID, Epoch: k.epoch, InstanceID: b.InstanceID,
				ProviderID: providerID(k.workspaceID, k.epoch), StartedAt: b.launchedAt, EndedAt: b.endedAt, Strays: b.Strays,
				StraysAt: b.straysAt,
			})
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("list instances: %w", err)
	}
	return out, nil
}
