package mesh

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"path/filepath"
	"sync"
	"time"

	"github.com/gpuaas/mesh/devstack/scratch"
	"github.com/gpuaas/mesh/drill/kit/await"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/mesh/agents"
	"github.com/gpuaas/mesh/mesh/cluster"
	"github.com/gpuaas/mesh/mesh/halt"
)

// ScaledLease is the lease of sagas in a scaled mesh: how long a run stays leased to a silent replica.
const ScaledLease = 3 * time.Second

// Scaled returns the policy values of a scaled mesh.
func Scaled() map[string]string {
	return map[string]string{
		policy.SagaStepStallSeconds: "8", policy.SagaWaitReadyStallSeconds: "8", policy.SagaCancelGraceSeconds: "5",
		policy.TaskStaleSweepIntervalSeconds: "2", policy.ChurnRecreatesPerHour: "60",
		policy.HeartbeatStaleAfterSeconds: "6",
		// Drills recover one machine again and again, and an agent whose certificate is lost learns of no other limit.
		policy.RecoveryAttemptsPerHour: "60",
	}
}

// scaledEnv returns the settings of a scaled mesh that are configuration and not policy.
func scaledEnv() []string {
	return append(cluster.FewConnections(),
		"GPUAAS_LIFECYCLE_SAGA_LEASE="+ScaledLease.String(), "GPUAAS_LIFECYCLE_ORPHAN_SWEEP=2s",
		"GPUAAS_LIFECYCLE_RELEASE_DEADLINE=5s", "GPUAAS_RECOVERY_MINT_WAIT=6s", "GPUAAS_LIFECYCLE_WOKEN_SWEEP=1s",
		"GPUAAS_RECOVERY_ADDRESSES_FRESH=10s",
	)
}

// ownNodes is the number of nodes of a mesh of the drills' own: one for the fault, one that must not be affected.
const ownNodes = 2

// Start brings up a mesh of the drills' own. Close ends it.
func Start(ctx context.Context, logger *slog.Logger, cfg Config) (*Mesh, error) {
	halt.Sweep(ctx, logger)
	dir := cfg.Dir
	var temporary *scratch.Dir
	if dir == "" {
		var err error
		if temporary, err = scratch.Make(halt.Drill); err != nil {
			return nil, err
		}
		dir = temporary.Path()
	}
	c := cluster.Config{
		Dir: filepath.Join(dir, "mesh"), Programs: cfg.Programs, CacheDir: cfg.CacheDir, Replicas: 2, Nodes: ownNodes,
		GPUs: 1, LogLevel: cfg.LogLevel,
	}
	if !cfg.Production {
		c.Policy, c.Env = Scaled(), scaledEnv()
	}
	released, err := reapLater(cfg, c.Dir)
	if err != nil {
		return nil, err
	}
	up, err := cluster.New(ctx, logger, c)
	if err != nil {
		return nil, errors.Join(err, released())
	}
	kept, cancel := context.WithCancel(context.WithoutCancel(ctx))
	var keeping sync.WaitGroup
	var keepErr error
	keeping.Go(func() { keepErr = up.Keep(kept) })
	m := &Mesh{Client: up.Client, Scaled: !cfg.Production, cluster: up}
	m.stop = func(ctx context.Context) error {
		cancel()
		keeping.Wait()
		err := errors.Join(keepErr, up.Close(ctx), released())
		if temporary != nil && err == nil {
			err = temporary.Remove()
		}
		return err
	}
	if err := up.Start(ctx); err != nil {
		return nil, errors.Join(err, fmt.Errorf("the services' logs end with:\n%s", up.Tails(8)),
			m.Close(context.WithoutCancel(ctx)))
	}
	return m, nil
}

// reapLater starts the process that ends everything that a mesh has launched if this process dies. The returned
// function releases it.
func reapLater(cfg Config, dir string) (func() error, error) {
	if cfg.Reaper == nil {
		return func() error { return nil }, nil
	}
	cmd := cfg.Reaper(dir)
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, fmt.Errorf("prepare the reaper: %w", err)
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start the reaper: %w", err)
	}
	return func() error { return errors.Join(in.Close(), cmd.Wait()) }, nil
}

// Reap waits until in ends, which is when the process that started this one is gone, and then ends all processes below
// the directory of a mesh: instances, agents and workloads.
func Reap(ctx context.Context, in io.Reader, dir string) error {
	_, _ = io.Copy(io.Discard, in)
	// The kernel ends the services, which would launch instances again.
	if err := await.Sleep(ctx, 300*time.Millisecond); err != nil {
		return err
	}
	_, err := agents.End(ctx, dir, 500*time.Millisecond)
	return err
}
