package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/exit"
	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/mesh/agents"
	"github.com/gpuaas/mesh/mesh/cluster"
	"github.com/gpuaas/mesh/mesh/dev"
	"github.com/gpuaas/mesh/mesh/halt"
)

func newClusterCommand() *cobra.Command {
	return needs(&cobra.Command{
		Use: "cluster", Short: "Run a mesh of separate processes on this machine", GroupID: groupMesh,
	}, "up", newClusterUpCommand())
}

func newClusterUpCommand() *cobra.Command {
	var cfg cluster.Config
	var level, contextName string
	cmd := &cobra.Command{
		Use: "up", Short: "Start every service as a process of its own, and keep them running until Ctrl-C", Args: noArgs,
		Long: "up runs the topology of a production mesh as separate processes: each service by its own command and " +
			"configuration file, in replicas\n" +
			"behind TCP balancers, agents, Postgres and Redis. Whatever ends by itself is started again, so any of it may be " +
			"killed.\n" +
			"The node authority is embedded in recovery here, and the balancers stand where an ingress would: new " +
			"connections go to replicas\n" +
			"that are ready and answer.",
		RunE: func(cmd *cobra.Command, _ []string) error { return runCluster(cmd, cfg, level, contextName) },
	}
	f := cmd.Flags()
	f.IntVar(&cfg.Replicas, "replicas", 2, "replicas of each service")
	f.IntVar(&cfg.Nodes, "nodes", 3, "how many node agents to run")
	f.StringVar(&cfg.Dir, "data-dir", "", "directory of data, identities and logs (default: cluster, beside that of dev)")
	f.StringVar(&cfg.Console, "console-addr", "", "where people and their clients connect (default: a free port)")
	f.StringVar(&cfg.Agents, "node-addr", "", "where agents connect (default: a free port)")
	f.StringVar(&cfg.Enroll, "enroll-addr", "", "where machines enrol (default: a free port)")
	f.StringVar(&cfg.LogLevel, "service-log-level", "info",
		"least level of the services' logs, which are files below the data directory")
	f.StringVar(&level, "log-level", "warn", "least level of the log on stderr")
	f.StringVar(&contextName, "context-name", "cluster",
		"name of the context that is written and made current, with -2, -3 … if another mesh that runs has it; empty: none")
	return cmd
}

func runCluster(cmd *cobra.Command, cfg cluster.Config, level, contextName string) error {
	began := time.Now()
	if cfg.Replicas < 1 || cfg.Nodes < 0 {
		return exit.Usage(errors.New("--replicas is at least 1, and --nodes at least 0"))
	}
	if err := placeCluster(&cfg); err != nil {
		return err
	}
	logger, err := terminalLogger(cmd.ErrOrStderr(), level)
	if err != nil {
		return exit.Usage(err)
	}
	ctx, release := app.WithSignals(cmd.Context(), logger, halt.Force(cfg.Dir))
	defer release()
	c, err := cluster.New(ctx, logger, cfg)
	if err != nil {
		return err
	}
	up := func(ctx context.Context) error {
		if err := c.Start(ctx); err != nil {
			return err
		}
		if err := printCluster(ctx, cmd, c, cfg, contextName, time.Since(began)); err != nil {
			return err
		}
		<-ctx.Done()
		return nil
	}
	err = app.Run(ctx, logger, app.Task{Name: "keep", Phase: app.PhaseDrain, Run: c.Keep},
		app.Task{Name: "up", Phase: app.PhaseNotReady, Run: up})
	return errors.Join(err, c.Close(context.WithoutCancel(ctx)))
}

// placeCluster sets the paths of the cluster's files and programs.
func placeCluster(cfg *cluster.Config) error {
	if cfg.Dir == "" {
		dir, err := dev.DefaultDataDir()
		if err != nil {
			return err
		}
		cfg.Dir = filepath.Join(filepath.Dir(dir), "cluster")
	}
	var err error
	if cfg.Dir, err = filepath.Abs(cfg.Dir); err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find own program: %w", err)
	}
	cfg.Programs, cfg.CacheDir = filepath.Dir(self), dev.CacheDir()
	if _, err := agents.Find(filepath.Join(cfg.Programs, agents.Program)); err != nil {
		return fmt.Errorf("the node agent stands beside this program in a cluster: %w", err)
	}
	return nil
}

func printCluster(ctx context.Context, cmd *cobra.Command, c *cluster.Cluster, cfg cluster.Config, contextName string,
	took time.Duration,
) error {
	roots, err := pki.ReadFile(c.Material.ServiceRoots())
	if err != nil {
		return err
	}
	written := "none"
	if write := announce(cmd.ErrOrStderr(), contextName); write != nil {
		if written, err = write(ctx, dev.Announcement{
			Server: c.Plan.Addresses.Console, TrustDomain: cluster.TrustDomain, CAPEM: string(roots), Token: c.Token(),
			Dir: cfg.Dir,
		}); err != nil {
			return err
		}
	}
	out := cmd.OutOrStdout()
	fmt.Fprintf(out, "gpuaas cluster   (data and logs: %s)\n", cfg.Dir)
	fmt.Fprintf(out, "API:       https://%s   context: %s\n", c.Plan.Addresses.Console, written)
	fmt.Fprintf(out, "Node API:  %s mTLS, %d replicas   Enrolment: https://%s\n", c.Plan.Addresses.Agents, len(c.NodeAPI),
		c.Plan.Addresses.Enroll)
	for _, p := range c.Processes() {
		fmt.Fprintf(out, "Process:   %-12s pid %-7d http://%s/readyz\n", p.Name, p.PID(), p.Ops)
	}
	for _, a := range c.Nodes {
		fmt.Fprintf(out, "Agent:     %-10s pid %d\n", a.Name(), a.PID())
	}
	fmt.Fprintf(cmd.ErrOrStderr(), "ready in %.1f s\n", took.Seconds())
	return nil
}
