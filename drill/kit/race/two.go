package race

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/gpuaas/mesh/drill/kit"
	"github.com/gpuaas/mesh/drill/kit/await"
	"github.com/gpuaas/mesh/drill/kit/host"
	"github.com/gpuaas/mesh/drill/kit/stage"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/mesh/cluster"
)

// seesTwo is how long the product's detector of two instances may take where its sweep runs every second.
const seesTwo = 30 * time.Second

// detects proves that the product itself finds two instances of one workspace: only then does the absence of such a
// finding after the races prove anything. The end of the former epoch's instance is taken out of the driver's launch
// log, so that the placement lists two, while the sweep that would end one of them waits; afterwards that sweep runs
// again, ends the instance once more, and the finding is resolved.
func (x *Race) detects(ctx context.Context) error {
	m := x.r.Mesh
	c, err := m.Cluster()
	if err != nil {
		return err
	}
	if f, err := x.twoInstances(ctx); err != nil || f != nil {
		return stage.At(stage.Evidence, errors.Join(err, openTwo(f)))
	}
	period := "1s"
	if x.r.Control == kit.Mutated {
		period = "1h"
	}
	err = m.Restart(ctx, c.Lifecycle, "GPUAAS_LIFECYCLE_ORPHAN_SWEEP=1h", "GPUAAS_LIFECYCLE_FINDING_GRACE=1s",
		"GPUAAS_LIFECYCLE_FINDING_SWEEP="+period)
	if err != nil {
		return errors.Join(stage.At(stage.Evidence, err), x.asBefore(ctx, c))
	}
	seen := x.doubled(ctx, c)
	if err := x.asBefore(ctx, c); err != nil || seen != nil {
		return stage.At(stage.Evidence, errors.Join(seen, err))
	}
	err = await.Until(ctx, "the second instance to be ended and the finding to be resolved", await.Limit,
		func(ctx context.Context) error {
			f, err := x.twoInstances(ctx)
			return errors.Join(err, openTwo(f))
		})
	return stage.At(stage.Evidence, errors.Join(err, host.Reend(c.Plan.InstanceDir, x.id, x.epoch-1)))
}

// asBefore starts the replicas of lifecycle anew without the settings of the drill.
func (x *Race) asBefore(ctx context.Context, c *cluster.Cluster) error {
	var err error
	x.r.Finally(ctx, func(ctx context.Context) { err = x.r.Mesh.Restart(ctx, c.Lifecycle) })
	return err
}

// doubled makes the driver list two instances of the workspace, and waits for the finding.
func (x *Race) doubled(ctx context.Context, c *cluster.Cluster) error {
	former := x.epoch - 1
	began := time.Now()
	return await.Until(ctx, "the finding on two instances", seesTwo, func(ctx context.Context) error {
		// A scan for orphans that was due when the replicas ended still ends the instance once.
		again, err := host.Unend(c.Plan.InstanceDir, x.id, former)
		if err != nil {
			return err
		}
		if again {
			x.r.Note("the driver's launch log has the instances of epochs %d and %d alive", former, x.epoch)
		}
		f, err := x.twoInstances(ctx)
		if err != nil {
			return err
		}
		if f == nil {
			return errors.New("the API shows none")
		}
		x.r.Evidence(f.GetFindingId())
		x.r.Note("%s after %.2f s: %s", names.Of(f.GetKind()), time.Since(began).Seconds(), f.GetSummary())
		return nil
	})
}

// twoInstances returns the open finding on two instances of the workspace, nil for none.
func (x *Race) twoInstances(ctx context.Context) (*lifecyclev1.Finding, error) {
	resp, err := x.r.Mesh.Client.Findings.ListFindings(ctx,
		&readmodelv1.ListFindingsRequest{Workspace: x.id, PageSize: 100})
	if err != nil {
		return nil, err
	}
	for _, f := range resp.GetItems() {
		if f.GetKind() == commonv1.FindingKind_FINDING_KIND_INSTANCE_WITHOUT_ROW && f.GetSubjectId() == x.id &&
			f.GetResolvedAt() == nil {
			return f, nil
		}
	}
	return nil, nil
}

// openTwo returns nil if there is no open finding on two instances, else an error.
func openTwo(f *lifecyclev1.Finding) error {
	if f == nil {
		return nil
	}
	return fmt.Errorf("finding %s is open: %s", f.GetFindingId(), f.GetSummary())
}
