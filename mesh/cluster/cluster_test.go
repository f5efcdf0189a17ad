package cluster_test

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/mesh/agents"
	"github.com/gpuaas/mesh/mesh/cluster"
	"github.com/gpuaas/mesh/mesh/meshtest"
	"github.com/gpuaas/mesh/mesh/reap"
)

// up brings a cluster up for the test.
func up(t *testing.T, cfg cluster.Config) *cluster.Cluster {
	t.Helper()
	ctx := testkit.Context(t)
	c, err := cluster.New(ctx, testkit.Logger(t), cfg)
	if err != nil {
		t.Fatal(err)
	}
	kept, cancel := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() { ended <- c.Keep(kept) }()
	t.Cleanup(func() {
		cancel()
		if err := errors.Join(<-ended, c.Close(context.WithoutCancel(ctx))); err != nil {
			t.Error(err)
		}
		if procs, err := reap.Under(cfg.Dir, agents.Program); err != nil || len(procs) > 0 {
			t.Errorf("left running: %v, %v", procs, err)
		}
	})
	if err := c.Start(ctx); err != nil {
		t.Fatal(err)
	}
	return c
}

// probe sends a node a probe through every component between a person and an agent.
func probe(ctx context.Context, c *cluster.Cluster, node string) error {
	resp, err := c.Client.Command.ProbeNode(ctx, &readmodelv1.ProbeNodeRequest{Node: node})
	for range 100 {
		// A node that has just been enrolled may be connected before lifecycle has its event.
		if !fault.Has(err, commonv1.Reason_REASON_NOT_FOUND) {
			break
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(50 * time.Millisecond):
		}
		resp, err = c.Client.Command.ProbeNode(ctx, &readmodelv1.ProbeNodeRequest{Node: node})
	}
	if err != nil {
		return err
	}
	for range 100 {
		got, err := c.Client.Query.GetTask(ctx,
			&readmodelv1.GetTaskRequest{TaskId: resp.GetTask().GetTaskId(), MinPos: resp.GetPos()})
		if err != nil {
			return err
		}
		if got.GetTask().GetState() == commonv1.TaskState_TASK_STATE_SUCCEEDED {
			return nil
		}
		err = fmt.Errorf("probe is %s", names.Of(got.GetTask().GetState()))
		select {
		case <-ctx.Done():
			return err
		case <-time.After(50 * time.Millisecond):
		}
	}
	return errors.New("probe is not answered")
}

func TestEveryProcessMayDie(t *testing.T) {
	testkit.IO(t)
	ctx := testkit.Context(t)
	c := up(t, cluster.Config{
		Dir: filepath.Join(meshtest.Dir(t), "mesh"), Programs: meshtest.Programs(t), Replicas: 2, Nodes: 1,
	})
	if err := probe(ctx, c, "n1"); err != nil {
		t.Fatal(err)
	}
	node, err := c.Client.Query.GetNode(ctx, &readmodelv1.GetNodeRequest{Node: "n1"})
	if err != nil {
		t.Fatal(err)
	}
	kills := map[string]func() error{
		"postgres": c.Stores.Postgres.Kill9,
		"redis":    c.Stores.Redis.Kill9,
		"agent":    c.Nodes[0].Kill9,
	}
	for _, p := range c.Processes() {
		kills[p.Name] = p.Kill9
	}
	for name, kill := range kills {
		if err := kill(); err != nil {
			t.Fatalf("kill %s: %v", name, err)
		}
		testkit.Eventually(t, testkit.Patience, func() error {
			for _, p := range c.Processes() {
				if err := p.Ready(ctx); err != nil {
					return fmt.Errorf("after the end of %s: %w", name, err)
				}
			}
			if err := probe(ctx, c, "n1"); err != nil {
				return fmt.Errorf("after the end of %s: %w", name, err)
			}
			return nil
		})
	}
	after, err := c.Client.Query.GetNode(ctx, &readmodelv1.GetNodeRequest{Node: "n1"})
	if err != nil {
		t.Fatal(err)
	}
	before, now := node.GetNode().GetIdentity(), after.GetNode().GetIdentity()
	if before.GetNodeInstanceId() != now.GetNodeInstanceId() ||
		now.GetState() != commonv1.NodeIdentityState_NODE_IDENTITY_STATE_ACTIVE {
		t.Errorf("the node was %v and is %v", before, now)
	}
}

// TestSessionsLeaveAPausedReplica stops a replica of the node API that has sessions. They come back at the other one
// while it is stopped. How fast they do is measured where time is simulated, in the agent's session.
func TestSessionsLeaveAPausedReplica(t *testing.T) {
	testkit.IO(t)
	ctx := testkit.Context(t)
	const nodes = 4
	c := up(t, cluster.Config{
		Dir: filepath.Join(meshtest.Dir(t), "mesh"), Programs: meshtest.Programs(t), Replicas: 2, Nodes: nodes,
	})
	sessions := func() (map[string]int, error) {
		at := map[string]int{}
		for i := range nodes {
			got, err := c.Client.Query.GetNode(ctx, &readmodelv1.GetNodeRequest{Node: fmt.Sprintf("n%d", i+1)})
			if err != nil {
				return nil, err
			}
			if got.GetNode().GetConnected() {
				at[got.GetNode().GetSession().GetReplicaId()]++
			}
		}
		return at, nil
	}
	at, err := sessions()
	if err != nil {
		t.Fatal(err)
	}
	paused, other := c.NodeAPI[0], c.NodeAPI[1]
	if at[paused.Replica()] < at[other.Replica()] {
		paused, other = other, paused
	}
	if at[paused.Replica()] == 0 {
		t.Fatalf("no sessions at %s: %v", paused.Name, at)
	}
	if err := paused.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := paused.Signal(syscall.SIGCONT); err != nil {
			t.Error(err)
		}
	})
	testkit.Eventually(t, 2*time.Minute, func() error {
		at, err := sessions()
		if err != nil {
			return err
		}
		if n := at[other.Replica()]; n != nodes {
			return fmt.Errorf("%d of %d sessions are at %s", n, nodes, other.Name)
		}
		return nil
	})
	if err := probe(ctx, c, "n1"); err != nil {
		t.Error(err)
	}
}
