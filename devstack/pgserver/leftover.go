package pgserver

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"syscall"
	"time"
)

// replaceLeftover ends whatever still runs on the data of a dead owner (we hold the owner lock, so no live process of
// ours wants it) and removes the lock files that only a comparison of pids could tell from those of a live server.
//
// A pid in postmaster.pid proves nothing: after a reboot or in a container another process soon has it, and Postgres
// then refuses to start for ever. A process whose working directory is the data directory is one of ours.
func replaceLeftover(ctx context.Context, log *slog.Logger, dataDir, sockets string) error {
	if _, err := os.Stat(filepath.Join(dataDir, "postmaster.pid")); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if runtime.GOOS != "linux" {
		return nil // no /proc: Postgres's own check has to do
	}
	postmaster := recordedPID(dataDir)
	for round, pause := 0, 20*time.Millisecond; ; round++ {
		pids, err := processesIn(dataDir)
		if err != nil {
			return fmt.Errorf("look for leftover server: %w", err)
		}
		if len(pids) == 0 {
			break
		}
		// The dead parent's signal is already on its way in most cases, so the first rounds only wait.
		sig := syscall.Signal(0)
		switch {
		case round == 10:
			sig = syscall.SIGINT
		case round == 150:
			sig = syscall.SIGQUIT
		case round == 300:
			sig = syscall.SIGKILL
		case round > 500:
			return fmt.Errorf("a leftover Postgres (pids %v) on %s does not end", pids, dataDir)
		}
		if sig != 0 {
			log.WarnContext(ctx, "ending leftover postgres", slog.Any("pids", pids), slog.String("signal", sig.String()))
			for _, pid := range pids {
				// Backends follow their postmaster; signalling it alone lets it shut down in order.
				if pid == postmaster || sig == syscall.SIGKILL || !slices.Contains(pids, postmaster) {
					_ = syscall.Kill(pid, sig)
				}
			}
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(pause):
		}
	}
	// No process has the directory as its working directory, so both lock files are stale, whichever processes have their
	// pids now.
	stale := []string{filepath.Join(dataDir, "postmaster.pid")}
	if locks, err := filepath.Glob(filepath.Join(sockets, ".s.PGSQL.*")); err == nil {
		stale = append(stale, locks...)
	}
	for _, path := range stale {
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("remove stale lock: %w", err)
		}
	}
	return nil
}

func recordedPID(dataDir string) int {
	b, err := os.ReadFile(filepath.Join(dataDir, "postmaster.pid")) // the directory is ours
	if err != nil {
		return 0
	}
	line, _, _ := bytes.Cut(b, []byte("\n"))
	pid, err := strconv.Atoi(string(bytes.TrimSpace(line)))
	if err != nil {
		return 0
	}
	return pid
}

// processesIn lists the live processes whose working directory is dir.
func processesIn(dir string) ([]int, error) {
	want, err := os.Stat(dir)
	if err != nil {
		return nil, err
	}
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	var pids []int
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		st, err := os.Stat("/proc/" + e.Name() + "/cwd")
		if err != nil || !os.SameFile(st, want) {
			continue // ended meanwhile, a zombie, or not readable for us
		}
		pids = append(pids, pid)
	}
	return pids, nil
}
