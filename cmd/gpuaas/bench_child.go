package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/gpuaas/mesh/bench/reconnect"
	"github.com/gpuaas/mesh/bench/resume"
	"github.com/gpuaas/mesh/bench/streams"
	"github.com/gpuaas/mesh/bench/tasks"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/exit"
)

// benchChild returns the command that runs this binary again, as the measured server or as its load.
func benchChild(kind string) *exec.Cmd {
	self, err := os.Executable()
	if err != nil {
		self = os.Args[0]
	}
	return exec.Command(self, "bench", "child", kind) //nolint:gosec,noctx // this very program; process ends it
}

// benchPeers returns the command that runs the program of the other engines, which `make peers` puts beside this one.
func benchPeers(kind string) *exec.Cmd {
	at := "gpuaas-bench-peers"
	if self, err := os.Executable(); err == nil {
		at = filepath.Join(filepath.Dir(self), at)
	}
	return exec.Command(at, kind) //nolint:noctx // it stands beside this program; process ends it
}

func runBenchChild(cmd *cobra.Command, kind string) error {
	logger := slog.New(slog.NewTextHandler(cmd.ErrOrStderr(), &slog.HandlerOptions{Level: slog.LevelError}))
	for _, serve := range []func(context.Context, string, io.Reader, io.Writer, *slog.Logger) (bool, error){
		streams.Child, resume.Child, tasks.Child, reconnect.Child,
	} {
		if mine, err := serve(cmd.Context(), kind, cmd.InOrStdin(), cmd.OutOrStdout(), logger); mine {
			return err
		}
	}
	return exit.Usage(fmt.Errorf("no bench has a child of kind %q", kind))
}
