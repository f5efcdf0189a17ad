package fence

import (
	"context"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/config"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/mesh/dev"
	"github.com/gpuaas/mesh/mesh/material"
	"github.com/gpuaas/mesh/services/lifecycle/task"
)

// MostServing is the p99, in milliseconds, of a task whose hint was lost: ten seconds until lifecycle or a sequencer
// polls without a notification, and the task's way to the agent and back.
const MostServing = 12_000.0

// openLifecycle opens the mesh's database as lifecycle does.
func openLifecycle(ctx context.Context, mesh *dev.Mesh) (*pgxpool.Pool, error) {
	url, err := config.SecretFile(material.Layout{Dir: filepath.Join(mesh.Dir(),
		"material")}.URLFile(pg.RoleLifecycle)).Read()
	if err != nil {
		return nil, fmt.Errorf("read the address of the database: %w", err)
	}
	pool, err := pg.Open(ctx, pg.Config{URL: url.Reveal(), ApplicationName: "bench fence", MaxConns: 2})
	if err != nil {
		return nil, fmt.Errorf("open the database: %w", err)
	}
	return pool, nil
}

// serve queues a probe for a node in the state left by a replica of lifecycle that ends right after its commit: neither
// the hub nor a sequencer is notified. It returns the time from the row to the end of the task by the clock of the
// database.
func serve(ctx context.Context, mesh *dev.Mesh, pool *pgxpool.Pool, name string) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	node, err := mesh.Client().Query.GetNode(ctx, &readmodelv1.GetNodeRequest{Node: name})
	if err != nil {
		return 0, fmt.Errorf("read the node: %w", err)
	}
	// Nodes with work are listed every second while there are any: the probes come at all phases of that second.
	if !app.Sleep(ctx, rand.N(time.Second)) {
		return 0, fmt.Errorf("queue a probe: %w", context.Cause(ctx))
	}
	var row task.Row
	key := "bench/" + ids.New()
	err = pg.InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) error {
		var err error
		row, err = task.Enqueue(ctx, tx, task.Spec{
			Type: commonv1.TaskType_TASK_TYPE_PROBE_NOOP, NodeID: node.GetNode().GetNodeId(), IdempotencyKey: key,
			StartWithin: patience, Payload: &nodev1.ProbeNoop{Nonce: "bench"}, CreatedBy: "bench",
		})
		return err
	})
	for err == nil && !task.Terminal(row.State) {
		if !app.Sleep(ctx, 50*time.Millisecond) {
			return 0, fmt.Errorf("a probe is %s: %w", names.Of(row.State), context.Cause(ctx))
		}
		err = pg.InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) error {
			var err error
			row, err = task.ByKey(ctx, tx, key)
			return err
		})
	}
	if err == nil && row.State != commonv1.TaskState_TASK_STATE_SUCCEEDED {
		err = fmt.Errorf("it ended as %s: %s", names.Of(row.State), row.Error)
	}
	if err != nil {
		return 0, fmt.Errorf("serve a probe: %w", err)
	}
	return row.StateAt.Sub(row.CreatedAt), nil
}
