// Package e2e_test holds the promises of a whole mesh, run by its real programs as separate processes, against faults
// that are real: kill -9, SIGSTOP, a lock store that loses everything.
//
// The results are checked from outside: the launch log of the placement driver, processes, sockets, the list of the
// workload database, and the API that people use. Rows of the mesh are read to be compared with these, never to replace
// them.
package e2e_test

import (
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/mesh/agents"
	"github.com/gpuaas/mesh/mesh/cluster"
	"github.com/gpuaas/mesh/mesh/meshtest"
)

// envReaper makes this test binary a reaper of the named directory.
const envReaper = "GPUAAS_E2E_REAP"

// TestMain doubles as the reaper: a process that waits for the end of the tests, however sudden, and then ends
// everything that their meshes had launched.
func TestMain(m *testing.M) {
	if dir := os.Getenv(envReaper); dir != "" {
		_, _ = io.Copy(io.Discard, os.Stdin)
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		defer cancel()
		app.Sleep(ctx, 300*time.Millisecond) // the kernel ends the services, which would launch instances again
		if err := end(ctx, dir); err != nil {
			os.Exit(1)
		}
		return
	}
	testkit.Main(m, testkit.AtOnce(4))
}

// reapLater ends the processes that are left below dir when this process has ended, by a process of its own.
func reapLater(t test, dir string) {
	t.Helper()
	cmd := exec.Command(os.Args[0]) // this binary, which outlives us on purpose
	cmd.Env = append(os.Environ(), envReaper+"="+dir)
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = in.Close()
		if err := cmd.Wait(); err != nil {
			t.Errorf("reaper: %v", err)
		}
	})
}

// end ends the instances, agents and workloads below a mesh's directory.
func end(ctx context.Context, dir string) error {
	_, err := agents.End(ctx, dir, 500*time.Millisecond)
	return err
}

// start brings up a mesh that ends with the test.
func start(t test, cfg cluster.Config) *cluster.Cluster {
	t.Helper()
	cfg.Dir, cfg.Programs = meshtest.Dir(t), meshtest.Programs(t)
	meshtest.Postgres(t, filepath.Join(cfg.Dir, "postgres"))
	reapLater(t, cfg.Dir)
	cfg.Env = append([]string{
		"GPUAAS_FAILPOINT_REPORT=" + filepath.Join(cfg.Dir, hitsFile),
		"GPUAAS_LIFECYCLE_SAGA_LEASE=3s",
	}, append(cluster.FewConnections(), cfg.Env...)...)
	if cfg.Replicas == 0 {
		cfg.Replicas = 2
	}
	began := time.Now()
	c, err := cluster.New(t.ctx, testkit.Logger(t), cfg)
	if err != nil {
		t.Fatal(err)
	}
	outlast := context.WithoutCancel(t.ctx)
	kept, cancel := context.WithCancel(outlast)
	ended := make(chan error, 2)
	go func() { ended <- c.Keep(kept) }()
	go func() { ended <- watchOver(kept, t, c) }()
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the logs end with:\n%s", c.Tails(12))
		}
		cancel()
		if err := errors.Join(<-ended, <-ended); err != nil {
			t.Errorf("keep: %v", err)
		}
		ctx, cancel := context.WithTimeout(outlast, 3*time.Minute)
		defer cancel()
		if err := c.Close(ctx); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	if err := c.Start(t.ctx); err != nil {
		t.Fatal(err)
	}
	t.Logf("a mesh of %d processes and %d agents stands after %.1f s in %s", len(c.Processes()), len(c.Nodes),
		time.Since(began).Seconds(), cfg.Dir)
	return c
}

// watchOver ends the test's context, and so all its waits, when a process cannot live.
func watchOver(ctx context.Context, t test, c *cluster.Cluster) error {
	for app.Sleep(ctx, 250*time.Millisecond) {
		if err := c.Broken(); err != nil {
			t.cancel(err)
			return nil
		}
	}
	return nil
}

// hitsFile is the file in which processes note the kill points that they die at.
const hitsFile = "hits"
