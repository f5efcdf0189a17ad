package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"

	"github.com/spf13/cobra"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/exit"
	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/config"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/mesh/topology"
)

// newServiceCommands returns one command for each service.
func newServiceCommands() []*cobra.Command {
	var out []*cobra.Command
	for _, kind := range topology.Kinds() {
		var file string
		cmd := &cobra.Command{
			Use: kind.Name + " --config FILE", Short: "Run one replica of the service " + kind.Name, Args: noArgs,
			GroupID: groupServices, RunE: func(cmd *cobra.Command, _ []string) error { return runService(cmd, kind, file) },
		}
		cmd.Flags().StringVar(&file, "config", "", "configuration file, YAML")
		_ = cmd.MarkFlagRequired("config")
		_ = cmd.MarkFlagFilename("config", "yaml", "yml")
		out = append(out, cmd)
	}
	return out
}

func runService(cmd *cobra.Command, kind topology.Kind, file string) error {
	loaded, err := kind.Load(file, os.Environ())
	if err != nil {
		return exit.Usage(problems(err))
	}
	logger, err := obs.NewLogger(cmd.ErrOrStderr(), loaded.Log)
	if err != nil {
		return exit.Usage(err)
	}
	registry, err := obs.NewRegistry()
	if err != nil {
		return err
	}
	ctx, release := app.WithSignals(cmd.Context(), logger)
	defer release()
	defer app.BoundHeap()()
	service, err := loaded.Open(ctx, logger, registry)
	if err != nil {
		return err
	}
	version, revision := obs.Build()
	logger.LogAttrs(ctx, slog.LevelInfo, "service started", slog.String(obs.KeyService, kind.Name),
		slog.String("version", version), slog.String("revision", revision), slog.String("ops_addr", service.OpsAddr()),
		slog.Int("pid", os.Getpid()))
	err = service.Run(ctx)
	if err != nil && ctx.Err() != nil && (errors.Is(err, context.Canceled) || errors.Is(err, app.ErrShutdown)) {
		return nil // a requested shutdown is no error
	}
	return err
}

// problems returns an error with each problem of a configuration on a line of its own.
func problems(err error) error {
	list := config.Problems(err)
	if len(list) < 2 {
		return err
	}
	return fmt.Errorf("%d problems:\n%w", len(list), err)
}
