package mesh

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"

	"github.com/gpuaas/mesh/drill/kit/host"
	"github.com/gpuaas/mesh/mesh/agents"
)

// Copy is a copy of an agent's directory, keys and state included, and the agent that runs from it.
type Copy struct {
	Dir      string
	Identity string // digest of the identity as it was copied

	program string
	pid     int
	process host.Process // of its agent, as the kernel had it
	done    chan struct{}
	code    int
}

// CopyAgent copies the directory of an agent, so that the copy works at its own path. The agent, whose process is pid,
// is stopped meanwhile, as by a snapshot of its disk; zero: it does not run.
func (m *Mesh) CopyAgent(pid int, from string) (*Copy, error) {
	c := &Copy{
		Dir:     filepath.Join(m.cluster.Dir(), "copies", FreshName(filepath.Base(from))),
		program: m.cluster.Plan.AgentBinary,
	}
	if pid != 0 {
		if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
			return nil, fmt.Errorf("stop the agent to copy it: %w", err)
		}
	}
	err := host.CopyTree(from, c.Dir)
	if pid != 0 {
		err = errors.Join(err, syscall.Kill(pid, syscall.SIGCONT))
	}
	if err != nil {
		return nil, fmt.Errorf("copy %s: %w", from, err)
	}
	c.Identity = host.IdentityDigest(c.Dir)
	return c, nil
}

// Start starts the agent of the copy, with args on its command line, unless it runs.
func (c *Copy) Start(args ...string) error {
	if c.Running() {
		return nil
	}
	log, err := os.OpenFile(filepath.Join(c.Dir, "copy.log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close() // the child has its own
	etc, state := filepath.Join(c.Dir, "etc"), filepath.Join(c.Dir, "state")
	//nolint:noctx // ours; ended by End
	cmd := exec.Command(c.program, append([]string{"run", "--etc-dir", etc, "--state-dir", state}, args...)...)
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + c.Dir}
	cmd.Dir, cmd.Stdout, cmd.Stderr = c.Dir, log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return err
	}
	// No wait has collected it yet: the pid is its own, ended or not.
	done := make(chan struct{})
	c.pid, c.process, c.done = cmd.Process.Pid, host.Kernel(cmd.Process.Pid), done
	go func() {
		defer close(done)
		_ = cmd.Wait() // the code says how it went
		c.code = cmd.ProcessState.ExitCode()
	}()
	return nil
}

// Running reports whether the agent of the copy was started and has not ended.
func (c *Copy) Running() bool {
	if c.done == nil {
		return false
	}
	select {
	case <-c.done:
		return false
	default:
		return true
	}
}

// Exit returns the exit code of the copy's agent, once it has ended.
func (c *Copy) Exit() (int, error) {
	if c.done == nil {
		return 0, errors.New("the agent of the copy was never started")
	}
	if c.Running() {
		return 0, fmt.Errorf("the agent of the copy runs on, as process %d", c.pid)
	}
	return c.code, nil
}

// Ran checks, by the kernel and by the files, that an agent was started with the identity that was copied.
func (c *Copy) Ran() error {
	if c.process.Start == 0 {
		return errors.New("the kernel knows of no agent of the copy")
	}
	if now := host.IdentityDigest(c.Dir); now != c.Identity {
		return fmt.Errorf("the copy's identity has the digest %.12s, not the one that was copied, %.12s", now, c.Identity)
	}
	return nil
}

// Kill kills the copy's agent if it still runs, and waits until it has ended. What it runs for workspaces lives on.
func (c *Copy) Kill() {
	if c.Running() {
		_ = syscall.Kill(c.pid, syscall.SIGKILL)
		<-c.done
	}
}

// End kills the copy's agent and all processes that it started, and removes the copy.
func (c *Copy) End(ctx context.Context) error {
	c.Kill()
	_, err := agents.End(ctx, c.Dir, 0)
	return errors.Join(err, os.RemoveAll(c.Dir))
}
