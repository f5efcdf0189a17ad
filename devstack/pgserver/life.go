package pgserver

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/gpuaas/mesh/devstack/child"
	"github.com/gpuaas/mesh/internal/ports"
)

// errPortTaken is returned if another process had bound the picked port before the server did.
var errPortTaken = errors.New("port is in use")

// startLocked starts the server and waits until it answers. It tries again while the obstacle is one that passes:
// backends of a predecessor that have not yet noticed its death, or a picked port that another process bound first.
func (s *Server) startLocked(ctx context.Context) error {
	if err := replaceLeftover(ctx, s.cfg.Logger, s.dataDir(), s.sockets); err != nil {
		return err
	}
	for attempt := 1; ; attempt++ {
		if s.port == 0 {
			port, err := ports.Pick(ctx, "127.0.0.1")
			if err != nil {
				return err
			}
			s.port = port
		}
		err := s.launch(ctx)
		if err == nil {
			return nil
		}
		transient := errors.Is(err, errPortTaken) && s.cfg.Port == 0
		if transient && s.child == nil {
			s.port = 0 // no client has the number yet; a restart has to wait for the same port
		}
		for _, sign := range []string{"postmaster.pid", "shared memory block", "lock file"} {
			transient = transient || strings.Contains(err.Error(), sign)
		}
		if errors.Is(err, errPortTaken) && s.cfg.Port != 0 {
			return fmt.Errorf("postgres port %d is in use on 127.0.0.1: %w", s.cfg.Port, err)
		}
		if !transient || ctx.Err() != nil {
			return err
		}
		s.cfg.Logger.WarnContext(ctx, "postgres did not start, trying again", slog.Int("attempt", attempt),
			slog.Any("error", err))
		select {
		case <-ctx.Done():
			return errors.Join(ctx.Err(), err)
		case <-time.After(min(time.Duration(attempt)*50*time.Millisecond, time.Second)):
		}
		if err := replaceLeftover(ctx, s.cfg.Logger, s.dataDir(), s.sockets); err != nil {
			return err
		}
	}
}

func (s *Server) launch(ctx context.Context) error {
	logFile, err := os.OpenFile(s.logPath(), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return fmt.Errorf("open postgres log: %w", err)
	}
	defer func() { _ = logFile.Close() }()
	from, err := logFile.Seek(0, io.SeekEnd)
	if err != nil {
		return fmt.Errorf("seek postgres log: %w", err)
	}
	set := s.settings()
	args := []string{"-D", s.dataDir()}
	for _, key := range slices.Sorted(maps.Keys(set)) {
		args = append(args, "-c", key+"="+set[key])
	}
	p, err := child.Start(child.Spec{
		Path: filepath.Join(s.bin.Dir, "postgres"), Args: args, Env: s.environ(), Dir: "/", Output: logFile,
		Credential: s.credential(),
		// A fast shutdown: transactions are rolled back, the data is checkpointed.
		DeathSignal: syscall.SIGINT,
	})
	if err != nil {
		return fmt.Errorf("run postgres: %w", err)
	}
	if err := s.await(ctx, p); err != nil {
		select {
		case <-p.Done():
			text := tail(s.logPath(), from)
			if strings.Contains(text, "Address already in use") {
				return fmt.Errorf("%w: %s", errPortTaken, text)
			}
			return noSpace(fmt.Errorf("postgres ended while starting: %w: %s", errors.Join(err, p.Exit()), text), text)
		default:
			return errors.Join(err, p.Stop(context.WithoutCancel(ctx), stopSteps()...))
		}
	}
	s.child = p
	return nil
}

// await returns once the server answers a query and reports fsync as on.
func (s *Server) await(ctx context.Context, p *child.Process) error {
	var last error
	for {
		fsync, err := s.show(ctx, "fsync")
		switch {
		case err == nil && fsync == "on":
			return nil
		case err == nil:
			return fmt.Errorf("the server runs with fsync %s", fsync)
		case isPgError(err, "28P01"):
			return fmt.Errorf("the superuser's password was changed; put the new one into %s: %w",
				filepath.Join(s.cfg.Dir, "superuser.password"), err)
		}
		last = err
		select {
		case <-p.Done():
			return last
		case <-ctx.Done():
			return fmt.Errorf("wait for postgres: %w: %w", ctx.Err(), last)
		case <-time.After(10 * time.Millisecond):
		}
	}
}

func stopSteps() []child.Step {
	return []child.Step{
		{Signal: syscall.SIGINT, Wait: 10 * time.Second}, // fast
		{Signal: syscall.SIGQUIT, Wait: 5 * time.Second}, // immediate
	}
}

// Stop shuts the server down, fast, then immediate, then by force, and releases the directory. It may be called more
// than once. The end of ctx forces the shutdown.
func (s *Server) Stop(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	err := s.child.Stop(ctx, stopSteps()...)
	if s.lock != nil {
		_ = os.Remove(s.sockets) // only if empty, which it is after an orderly end
		err = errors.Join(err, s.lock.Close())
		s.lock = nil
	}
	return err
}

// Kill9 kills the server as a power cut of the process would, for drills; Restart brings it back.
func (s *Server) Kill9() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.child.Signal(syscall.SIGKILL); err != nil {
		return err
	}
	<-s.child.Done()
	return nil
}

// Restart stops the server if it runs and starts it on the same port and data.
func (s *Server) Restart(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.lock == nil {
		return errors.New("restart postgres: it was stopped and its directory given free")
	}
	if err := s.child.Stop(ctx, stopSteps()...); err != nil {
		return fmt.Errorf("restart postgres: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, s.cfg.StartTimeout)
	defer cancel()
	return s.startLocked(ctx)
}

// Offline stops the server, calls fn with its data directory, and starts the server on the same port again, whatever fn
// returned. It is for copies of the directory, and for putting one in its place.
func (s *Server) Offline(ctx context.Context, fn func(dataDir string) error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.lock == nil {
		return errors.New("take postgres offline: it was stopped and its directory given free")
	}
	if err := s.child.Stop(ctx, stopSteps()...); err != nil {
		return fmt.Errorf("take postgres offline: %w", err)
	}
	err := fn(s.dataDir())
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.cfg.StartTimeout)
	defer cancel()
	return errors.Join(err, s.startLocked(ctx))
}

// tail returns the end of a log file, from an offset on, for an error text.
func tail(path string, from int64) string {
	b, err := os.ReadFile(path)
	if err != nil || from > int64(len(b)) {
		return ""
	}
	b = bytes.TrimSpace(b[from:])
	if len(b) > 1500 {
		b = b[len(b)-1500:]
	}
	return string(b)
}
