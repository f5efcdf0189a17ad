package cluster

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/gpuaas/mesh/devstack/child"
	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/mesh/topology"
)

// Process is one process of a service. It is started by Start and, while Keep runs, again whenever it ends by itself.
type Process struct {
	Name    string // of the process: `recovery-1`, `nodeapi-2`
	Service string // that it is a replica of
	Ops     string // host:port of its metrics and health

	binary, config, log string
	env                 []string
	logger              *slog.Logger

	mu       sync.Mutex
	process  *child.Process
	replicas map[int]string // ids of the incarnations by pid
	before   func() []string
	exits    []Exit
	wanted   bool
	starts   int
	changed  chan struct{} // gets a value when there is another process to watch
}

// Exit is one end of a process.
type Exit struct {
	PID     int
	Replica string // the id under which it held leases and sessions
	At      time.Time
	Cause   string // as the operating system reports it: `signal: killed`, `exit status 1`
}

// killed is the cause of an end that came from outside, or from a kill point.
const killed = "signal: killed"

// BeforeStart sets the function that every later start calls for additions to its environment. It replaces an earlier
// one; nil means none.
func (p *Process) BeforeStart(ask func() []string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.before = ask
}

// Exits returns all ends of the process that Keep has recorded.
func (p *Process) Exits() []Exit {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.exits)
}

// Start starts the process if it does not run. env is added to the environment of this one incarnation: failpoints. It
// does not wait until the service is ready.
func (p *Process) Start(env ...string) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.wanted = true
	return p.startLocked(env)
}

func (p *Process) startLocked(env []string) error {
	if p.process != nil {
		select {
		case <-p.process.Done():
		default:
			return nil
		}
	}
	log, err := os.OpenFile(p.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("open log of %s: %w", p.Name, err)
	}
	defer log.Close()
	// Every incarnation is another replica, as when pods are replaced: none finds leases of its predecessor under its own
	// id.
	replica := ids.New()
	full := append([]string{
		"PATH=" + os.Getenv("PATH"), "HOME=" + os.Getenv("HOME"),
		"GPUAAS_" + strings.ToUpper(p.Service) + "_REPLICA_ID=" + replica,
	}, p.env...)
	if p.before != nil {
		full = append(full, p.before()...)
	}
	process, err := child.Start(child.Spec{
		Path: p.binary, Args: []string{p.Service, "--config", p.config}, Env: append(full, env...), Dir: "/", Output: log,
		DeathSignal: syscall.SIGTERM,
	})
	if err != nil {
		return err // the process that has ended stays, so that its keeper tries again
	}
	p.process = process
	if p.replicas == nil {
		p.replicas = map[int]string{}
	}
	p.replicas[p.process.PID()] = replica
	p.starts++
	select {
	case p.changed <- struct{}{}:
	default:
	}
	return nil
}

// PID returns the id of the process, zero before the first start. A process that has ended keeps its number until the
// next start.
func (p *Process) PID() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.process == nil {
		return 0
	}
	return p.process.PID()
}

// Replica returns the id under which the present incarnation holds leases and sessions.
func (p *Process) Replica() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.process == nil {
		return ""
	}
	return p.replicas[p.process.PID()]
}

// Starts returns how often the process was started.
func (p *Process) Starts() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.starts
}

// LogPath returns the path of the process's log.
func (p *Process) LogPath() string { return p.log }

// Signal sends a signal to the process, if it runs.
func (p *Process) Signal(sig syscall.Signal) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.process == nil {
		return nil
	}
	return p.process.Signal(sig)
}

// Kill9 kills the process with SIGKILL. While Keep runs it is started again.
func (p *Process) Kill9() error {
	p.mu.Lock()
	process := p.process
	p.mu.Unlock()
	if process == nil {
		return nil
	}
	if err := process.Signal(syscall.SIGKILL); err != nil {
		return err
	}
	<-process.Done()
	return nil
}

// LetDie makes the next end of the process final until Start is called.
func (p *Process) LetDie() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.wanted = false
}

// Stop ends the process in order, and it stays ended.
func (p *Process) Stop(ctx context.Context) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.wanted = false
	if p.process == nil {
		return nil
	}
	return p.process.Stop(ctx, child.Step{Signal: syscall.SIGTERM, Wait: 30 * time.Second})
}

// keep starts the process again when it ended by itself, until ctx ends.
func (p *Process) keep(ctx context.Context) error {
	for {
		p.mu.Lock()
		process := p.process
		p.mu.Unlock()
		var done <-chan struct{}
		if process != nil {
			done = process.Done()
		}
		select {
		case <-ctx.Done():
			return nil
		case <-p.changed:
			continue
		case <-done:
		}
		p.record(process)
		// The pause keeps a process that cannot live from using up the processor.
		if !app.Sleep(ctx, 200*time.Millisecond) {
			return nil
		}
		p.mu.Lock()
		var err error
		if p.wanted && p.process == process {
			p.logger.WarnContext(ctx, "process ended and is started again", slog.String("process", p.Name),
				slog.Any("exit", process.Exit()))
			err = p.startLocked(nil)
		}
		wanted := p.wanted
		p.mu.Unlock()
		if err != nil {
			p.logger.ErrorContext(ctx, "process does not start", slog.String("process", p.Name), obs.Err(err))
		}
		if !wanted {
			select {
			case <-ctx.Done():
				return nil
			case <-p.changed:
			}
		}
	}
}

// record notes the end of an incarnation once.
func (p *Process) record(ended *child.Process) {
	cause := "exit status 0"
	if err := ended.Exit(); err != nil {
		cause = err.Error()
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if n := len(p.exits); n > 0 && p.exits[n-1].PID == ended.PID() {
		return
	}
	p.exits = append(p.exits, Exit{PID: ended.PID(), Replica: p.replicas[ended.PID()], At: time.Now(), Cause: cause})
}

// Ready returns nil if the process reports itself as ready.
func (p *Process) Ready(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	if err := topology.AskReady(ctx, topology.OneRequest(), p.Ops); err != nil {
		return fmt.Errorf("%s: %w", p.Name, err)
	}
	return nil
}

// Broken returns an error if the process ends by itself again and again, so that waiting for it is useless.
func (p *Process) Broken() error {
	const often = 3
	exits := slices.DeleteFunc(p.Exits(), func(e Exit) bool { return e.Cause == killed })
	if len(exits) < often {
		return nil
	}
	return fmt.Errorf("%s has ended by itself %d times, last: %s; its log, %s, ends with:\n%s", p.Name, len(exits),
		exits[len(exits)-1].Cause, p.log, Tail(p.log, 20))
}

// AwaitReady waits until the process is ready. It fails with the last answer and the end of the process's log when ctx
// ends, when readyWithin has passed, and at once when the process cannot live.
func (p *Process) AwaitReady(ctx context.Context) error {
	ctx, cancel := context.WithTimeoutCause(ctx, readyWithin, fmt.Errorf("%s is not ready after %s", p.Name, readyWithin))
	defer cancel()
	for {
		err := p.Ready(ctx)
		if err == nil {
			return nil
		}
		if broken := p.Broken(); broken != nil {
			return errors.Join(broken, err)
		}
		if !app.Sleep(ctx, 25*time.Millisecond) {
			return errors.Join(context.Cause(ctx), err, fmt.Errorf("its log, %s, ends with:\n%s", p.log, Tail(p.log, 20)))
		}
	}
}

// readyWithin is many times as long as a service needs on a busy machine.
const readyWithin = 2 * time.Minute
