package process

import (
	"errors"
	"fmt"
	"syscall"
	"time"

	"github.com/google/uuid"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/mesh/agent/room"
	"github.com/gpuaas/mesh/agent/runtime/isolation"
	"github.com/gpuaas/mesh/agent/runtime/output"
	"github.com/gpuaas/mesh/agent/runtime/procfs"
	"github.com/gpuaas/mesh/internal/failpoint"
)

// One run of a workload under its shim, from the stage before it executes to the end of the last of its processes.
// Whether another run follows is decided in shim.go.

// start begins one run: the process waits in its init stage until its pid and control group are on disk.
func (s *shim) start() error {
	stage, err := s.stage()
	if err != nil {
		return err
	}
	defer stage.Close()
	if err := failpoint.Hit("agent.shim.before_exec"); err != nil {
		return err
	}
	order := isolation.Order{Argv: s.spec.Argv, Env: s.spec.Env, Dir: s.spec.Dir, UID: s.spec.UID}
	refused, err := stage.Release(order, s.state.Run)
	if err != nil || refused != "" {
		if refused != "" {
			err = errors.New(refused)
		}
		err = errors.Join(err, s.tree().Kill(s.reap))
		s.closeChild()
		return err
	}
	s.state.Phase, s.state.RunningSince = phaseRunning, procfs.SinceBoot()
	if err := s.save(); err != nil && !room.IsFull(err) {
		err = errors.Join(err, s.tree().Kill(s.reap))
		s.closeChild()
		return err
	}
	return nil // on a full disk the file has the child as starting, and watch writes it again
}

func (s *shim) stage() (*isolation.Stage, error) {
	run := uuid.NewString()
	last := output.Exit{Run: s.state.Run, HasExited: s.state.HasExited, Code: s.state.ExitCode}
	out, err := s.output.Open(run, last)
	if err != nil {
		return nil, err
	}
	defer func() { _ = out.Close() }()
	if s.spec.UID >= 0 {
		// So that the workload may open /dev/stdout by name; the mode of the directory above keeps other users out.
		if err := out.Chown(s.spec.UID, s.spec.UID); err != nil {
			return nil, fmt.Errorf("give output to the workload: %w", err)
		}
	}
	stage, err := isolation.NewStage(selfExecutable, []string{programName, "shim", initArgument}, out)
	if err != nil {
		return nil, err
	}
	s.state.Run = run
	s.state.Child, s.own, s.exited = stage.Child, true, false
	s.state.Phase, s.state.StartedAt, s.state.RunningSince, s.state.Detail = phaseStarting, time.Now(), 0, ""
	s.state.HasExited, s.state.Final = false, false
	if err = isolation.Join(stage.Child.PID, s.spec.Cgroups); err == nil {
		err = s.save()
	}
	if err != nil {
		stage.Close()
		err = errors.Join(fmt.Errorf("prepare start: %w", err), s.tree().Kill(s.reap))
		s.closeChild()
		return nil, err
	}
	return stage, nil
}

// watch waits for the end of the child (true), or for the order to stop it, which it then does (false).
func (s *shim) watch() (bool, error) {
	ticker := time.NewTicker(watchEvery)
	defer ticker.Stop()
	done := s.adoptedEnd()
	for {
		s.reap()
		if s.exited {
			return true, nil
		}
		select {
		case <-s.children:
		case <-done:
			s.exited, s.code = true, exitUnknown
		case <-ticker.C:
			s.restore()
			s.output.Rotate()
		case sig := <-s.commands:
			stop := sig != syscall.SIGUSR1
			if !stop {
				if err := s.reload(); err != nil {
					return false, err
				}
				stop = !s.want.Run
			}
			if stop {
				return false, s.stop(done)
			}
		}
	}
}

// adoptedEnd returns a channel that is closed when an adopted child ends; nil for a child of this process. The
// goroutine lives as long as that child, or as this process.
func (s *shim) adoptedEnd() <-chan struct{} {
	if s.own {
		return nil
	}
	done := make(chan struct{})
	go func(child procfs.Process) {
		defer close(done)
		for !child.Wait(time.Minute) {
			continue
		}
	}(s.state.Child)
	return done
}

// stop ends the workload: it sends TERM to its process group, waits for the grace, then sends KILL to every process
// that is left of it.
func (s *shim) stop(done <-chan struct{}) error {
	grace := s.want.Grace
	if grace <= 0 {
		grace = DefaultGrace
	}
	if s.state.Child.Alive() {
		_ = unix.Kill(-s.state.Child.PID, syscall.SIGTERM) // it leads its group, and is alive: the number is its own
	}
	timer := time.NewTimer(grace)
	defer timer.Stop()
	for !s.exited {
		select {
		case <-s.children:
			s.reap()
			continue
		case <-done:
			s.exited, s.code = true, exitUnknown
			continue
		case <-timer.C:
		}
		break
	}
	if err := s.tree().Kill(s.reap); err != nil {
		return err
	}
	s.reap()
	if !s.exited {
		s.code = exitUnknown
	}
	s.state.HasExited, s.state.ExitCode, s.state.ExitedAt = true, s.code, time.Now()
	detail := describeExit(s.state.ExitCode)
	s.closeChild()
	if s.want.Run {
		// The host is shutting down, so the exit does not count as the workload's own, and the next shim starts it whatever
		// the policy.
		s.state.HasExited = false
	}
	return s.end(phaseStopped, detail)
}

// reap collects every child that ended: the workload's first process, whose exit code it notes, and orphans.
func (s *shim) reap() {
	for {
		var ws unix.WaitStatus
		pid, err := unix.Wait4(-1, &ws, unix.WNOHANG, nil)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil || pid <= 0 {
			return
		}
		if s.own && pid == s.state.Child.PID {
			s.exited = true
			s.code = int32(ws.ExitStatus())
			if ws.Signaled() {
				s.code = 128 + int32(ws.Signal()) // a signal's number
			}
		}
	}
}

func describeExit(code int32) string {
	switch {
	case code == exitUnknown:
		return "its exit status was lost with its shim"
	case code > 128:
		return fmt.Sprintf("ended by signal %d", code-128)
	default:
		return fmt.Sprintf("exited with status %d", code)
	}
}

func (s *shim) closeChild() {
	if s.pidfd > 0 {
		_ = unix.Close(s.pidfd)
		s.pidfd = 0
	}
	s.state.Child = procfs.Process{}
	s.state.Adopted = false
}
