// Command sharedpg runs a command with a Postgres that all test packages of the run share:
//
//	go run ./devstack/sharedpg -- go test ./...
//
// It starts the server, names it in GPUAAS_TEST_PG, passes signals on, stops the server after the command, and exits
// with the command's status. Without a command it prints the variable and waits for an interrupt.
package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"syscall"
	"time"

	"github.com/gpuaas/mesh/devstack/pgserver"
)

func main() {
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	args := os.Args[1:]
	if len(args) > 0 && args[0] == "--" {
		args = args[1:]
	}
	code, err := run(log, args)
	if err != nil {
		log.Error("test postgres", slog.Any("error", err))
		code = max(code, 1)
	}
	os.Exit(code)
}

func run(log *slog.Logger, args []string) (int, error) {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	server, err := pgserver.StartTemporary(ctx, log)
	if err != nil {
		return 1, err
	}
	code, err := command(ctx, pgserver.EnvShared+"="+server.AdminURL(), args)
	return code, errors.Join(err, server.Remove(ctx))
}

func command(ctx context.Context, env string, args []string) (int, error) {
	if len(args) == 0 {
		if _, err := fmt.Fprintln(os.Stdout, env); err != nil {
			return 1, err
		}
		<-ctx.Done()
		return 0, nil
	}
	cmd := exec.CommandContext(ctx, args[0], args[1:]...) //nolint:gosec // running the caller's command is the purpose
	cmd.Env = append(os.Environ(), env)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = 20 * time.Second
	err := cmd.Run()
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.ExitCode() > 0 {
		return exit.ExitCode(), nil
	}
	if err != nil {
		return 1, fmt.Errorf("run %s: %w", args[0], err)
	}
	return 0, nil
}
