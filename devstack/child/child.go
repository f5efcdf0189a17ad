package child

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"sync"
	"syscall"
	"time"
)

// Spec describes the process to run.
type Spec struct {
	// Path is the executable; Args are its arguments without the program name.
	Path string
	Args []string
	// Env is the whole environment of the process; nothing is inherited.
	Env []string
	// Dir is the working directory; empty means the parent's.
	Dir string
	// Output receives stdout and stderr. Nil discards both.
	Output *os.File
	// Credential, when set, is the identity the process drops to; only root can set it.
	Credential *syscall.Credential
	// DeathSignal is sent by the kernel when the parent dies (Linux only; elsewhere the child may outlive the parent, and
	// the parent's next start must replace it). Zero means SIGKILL.
	DeathSignal syscall.Signal
}

// Process is a running or ended child.
type Process struct {
	pid   int
	begun chan struct{} // closed when the process exists, or could not be started
	done  chan struct{}

	mu      sync.Mutex // guards reaped and orders Signal against wait
	reaped  bool
	process *os.Process
	state   *os.ProcessState
	err     error
}

// Start runs spec and returns once the process exists. The process is not tied to a context: it ends by Signal, by
// Stop, by itself, or with the parent.
func Start(spec Spec) (*Process, error) {
	p := &Process{begun: make(chan struct{}), done: make(chan struct{})}
	if err := children.add(p); err != nil {
		return nil, fmt.Errorf("start %s: %w", spec.Path, err)
	}
	started := make(chan error, 1)
	go p.supervise(spec, started)
	if err := <-started; err != nil {
		return nil, fmt.Errorf("start %s: %w", spec.Path, err)
	}
	return p, nil
}

// supervise keeps its thread for as long as the child lives: the kernel sends the parent-death signal when the thread
// that forked ends, not the process, and Go may end an idle thread at any time.
func (p *Process) supervise(spec Spec, started chan<- error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()

	//nolint:noctx // the caller chooses the binary; the process outlives any request context
	cmd := exec.Command(spec.Path, spec.Args...)
	cmd.Env = spec.Env
	cmd.Dir = spec.Dir
	if spec.Output != nil {
		cmd.Stdout, cmd.Stderr = spec.Output, spec.Output
	}
	if cmd.Env == nil {
		cmd.Env = []string{}
	}
	sig := spec.DeathSignal
	if sig == 0 {
		sig = syscall.SIGKILL
	}
	cmd.SysProcAttr = attributes(spec.Credential, sig)
	defer children.remove(p)
	if err := cmd.Start(); err != nil {
		p.reaped = true
		close(p.begun)
		close(p.done)
		started <- err
		return
	}
	p.process, p.pid = cmd.Process, cmd.Process.Pid
	close(p.begun)
	started <- nil

	err := cmd.Wait()
	p.mu.Lock()
	p.reaped, p.state, p.err = true, cmd.ProcessState, err
	p.mu.Unlock()
	close(p.done)
}

// PID returns the process id; it stays the same number after the process has ended.
func (p *Process) PID() int { return p.pid }

// Done returns a channel that is closed when the process has ended and been reaped.
func (p *Process) Done() <-chan struct{} { return p.done }

// Exit returns how the process ended; the result is meaningful only after Done is closed. Nil means exit status 0.
func (p *Process) Exit() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.err
}

// Signal delivers sig. A process that has already ended is not an error.
func (p *Process) Signal(sig syscall.Signal) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.reaped {
		return nil
	}
	if err := p.process.Signal(sig); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("signal process %d: %w", p.pid, err)
	}
	return nil
}

// Step is one rung of Stop: a signal and how long to wait for the end after it.
type Step struct {
	Signal syscall.Signal
	Wait   time.Duration
}

// Stop sends the signals of steps in turn until the process has ended. When ctx ends, Stop sends SIGKILL at once; Stop
// returns only when the process is gone.
func (p *Process) Stop(ctx context.Context, steps ...Step) error {
	for _, step := range steps {
		if err := p.Signal(step.Signal); err != nil {
			return err
		}
		timer := time.NewTimer(step.Wait)
		select {
		case <-p.done:
			timer.Stop()
			return nil
		case <-ctx.Done():
			timer.Stop()
			return p.kill()
		case <-timer.C:
		}
	}
	return p.kill()
}

func (p *Process) kill() error {
	if err := p.Signal(syscall.SIGKILL); err != nil {
		return err
	}
	<-p.done
	return nil
}
