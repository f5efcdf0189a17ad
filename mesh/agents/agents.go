// Package agents keeps node agents as child processes of a mesh on one machine.
//
// It owns an agent's directory as an installer would: the environment file and the pinned trust; everything else in it
// is the agent's. Whether an agent has enrolled is read from the agent's own files. It never mints an identity: a token
// comes from the mesh. Guarantees: an agent ends when this process does; the processes that it runs for workspaces
// outlive it unless End is called.
package agents

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/gpuaas/mesh/devstack/child"
	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/mesh/reap"
)

// Program is the file name of the agent.
const Program = "gpuaas-node-agent"

// exitReplaced is the agent's exit code for an instance that must not be started again.
const exitReplaced = 5

// Find returns the agent's binary: the one named, else the one beside this program, else the one on PATH.
func Find(named string) (string, error) {
	if named == "" {
		self, err := os.Executable()
		if err == nil {
			beside := filepath.Join(filepath.Dir(self), Program)
			if info, err := os.Stat(beside); err == nil && info.Mode().IsRegular() {
				return beside, nil
			}
		}
		path, err := exec.LookPath(Program)
		if err != nil {
			return "", fmt.Errorf("%s stands neither beside this program nor on PATH: build it with `make build`, or name it "+
				"with --agent-binary", Program)
		}
		named = path
	}
	path, err := filepath.Abs(named)
	if err != nil {
		return "", fmt.Errorf("find agent: %w", err)
	}
	if info, err := os.Stat(path); err != nil || info.IsDir() || info.Mode()&0o111 == 0 {
		return "", fmt.Errorf("--agent-binary %s is not a program", path)
	}
	return path, nil
}

// Config of one agent.
type Config struct {
	Name   string
	Dir    string // etc, state and the log below it
	Binary string
	GPUs   int      // simulated
	Env    []string // added to the agent's environment: failpoints
	// Where the mesh is.
	TrustDomain, APIURL, EnrollURL, CAFile string
}

// Agent is one node agent.
type Agent struct {
	cfg    Config
	logger *slog.Logger

	mu      sync.Mutex
	process *child.Process
	env     []string
	args    []string
	wanted  bool
}

// New makes an agent's directories.
func New(logger *slog.Logger, cfg Config) (*Agent, error) {
	a := &Agent{cfg: cfg, logger: logger.With(slog.String("agent", cfg.Name))}
	// Workloads run as other users and traverse this directory; the mode of each file protects it.
	for _, dir := range []struct {
		path string
		mode os.FileMode
	}{{cfg.Dir, 0o711}, {a.etc(), 0o700}, {a.state(), 0o711}} {
		if err := os.MkdirAll(dir.path, dir.mode); err != nil {
			return nil, fmt.Errorf("make directory of agent: %w", err)
		}
	}
	return a, nil
}

// Several makes the first n agents of a mesh, n1 to the last, each below dir, and writes the files that an installer
// would. They have cfg in common.
func Several(logger *slog.Logger, n int, dir string, cfg Config) ([]*Agent, error) {
	var list []*Agent
	for i := range n {
		cfg.Name = fmt.Sprintf("n%d", i+1)
		cfg.Dir = filepath.Join(dir, cfg.Name)
		a, err := New(logger, cfg)
		if err != nil {
			return nil, err
		}
		if err := a.Furnish(""); err != nil {
			return nil, err
		}
		list = append(list, a)
	}
	return list, nil
}

func (a *Agent) etc() string     { return filepath.Join(a.cfg.Dir, "etc") }
func (a *Agent) state() string   { return filepath.Join(a.cfg.Dir, "state") }
func (a *Agent) pinned() string  { return filepath.Join(a.etc(), "recovery-ca-bundle.crt") }
func (a *Agent) envFile() string { return filepath.Join(a.etc(), "node-agent.env") }

// Name returns the name of the node.
func (a *Agent) Name() string { return a.cfg.Name }

// LogPath returns the path of the agent's log.
func (a *Agent) LogPath() string { return filepath.Join(a.cfg.Dir, "agent.log") }

// Enrolled reports whether the agent holds an identity.
func (a *Agent) Enrolled() bool {
	found, err := pki.Exists(a.nodeFile())
	return err == nil && found
}

// SetEnv adds to the environment of the next incarnation, and of that alone: failpoints.
func (a *Agent) SetEnv(env ...string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.env = env
}

// SetArgs adds to the command line of the next incarnation, and of that alone.
func (a *Agent) SetArgs(args ...string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.args = args
}

// Start starts the agent's process.
func (a *Agent) Start() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.wanted = true
	if a.process != nil {
		select {
		case <-a.process.Done():
		default:
			return nil // it runs
		}
	}
	log, err := os.OpenFile(a.LogPath(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("open log of agent: %w", err)
	}
	defer log.Close()
	args := []string{"run", "--etc-dir", a.etc(), "--state-dir", a.state()}
	if a.cfg.GPUs > 0 {
		args = append(args, "--gpus", strconv.Itoa(a.cfg.GPUs))
	}
	args = append(args, a.args...)
	a.process, err = child.Start(child.Spec{
		Path: a.cfg.Binary, Args: args, Dir: a.cfg.Dir, Output: log, DeathSignal: syscall.SIGTERM,
		Env: slices.Concat([]string{"PATH=" + os.Getenv("PATH"), "HOME=" + a.cfg.Dir}, a.cfg.Env, a.env),
	})
	a.env, a.args = nil, nil
	return err
}

// PID returns the id of the agent's process, zero before the first start.
func (a *Agent) PID() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.process == nil {
		return 0
	}
	return a.process.PID()
}

// Running reports whether the agent's process runs.
func (a *Agent) Running() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.process == nil {
		return false
	}
	select {
	case <-a.process.Done():
		return false
	default:
		return true
	}
}

// Kill9 kills the agent with SIGKILL. The processes that it runs for workspaces live on.
func (a *Agent) Kill9() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.process == nil {
		return nil
	}
	if err := a.process.Signal(syscall.SIGKILL); err != nil {
		return err
	}
	<-a.process.Done()
	return nil
}

// LetDie makes the next end of the agent final until Start is called.
func (a *Agent) LetDie() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.wanted = false
}

// Stop ends the agent in order.
func (a *Agent) Stop(ctx context.Context) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.wanted = false
	if a.process == nil {
		return nil
	}
	return a.process.Stop(ctx, child.Step{Signal: syscall.SIGTERM, Wait: 3 * time.Second})
}

// errReplaced ends the supervision of an agent that must not run again.
var errReplaced = errors.New("agent was replaced")

// replaced reports whether an agent ended as one that must not run again.
func replaced(p *child.Process) bool {
	var exited *exec.ExitError
	return errors.As(p.Exit(), &exited) && exited.ExitCode() == exitReplaced
}

// Run keeps the agent running until ctx ends, then ends it.
func (a *Agent) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	return app.Supervise(ctx, a.logger, "agent",
		app.Backoff{Min: 200 * time.Millisecond, Max: 10 * time.Second, Reset: 30 * time.Second},
		func(ctx context.Context) error {
			err := a.runOnce(ctx)
			if errors.Is(err, errReplaced) {
				a.logger.ErrorContext(ctx, "agent will not be started again", obs.Err(err))
				cancel(err)
			}
			return err
		})
}

// Keep starts the agent again when it ended by itself, and leaves it alone while it was stopped; it ends with ctx and
// leaves the agent running.
func (a *Agent) Keep(ctx context.Context) error {
	for {
		if !app.Sleep(ctx, 200*time.Millisecond) {
			return nil
		}
		a.mu.Lock()
		p, wanted := a.process, a.wanted
		a.mu.Unlock()
		if p == nil || !wanted {
			continue
		}
		select {
		case <-p.Done():
		default:
			continue
		}
		if replaced(p) {
			return errReplaced
		}
		if err := a.Start(); err != nil {
			a.logger.ErrorContext(ctx, "agent does not start", obs.Err(err))
		}
	}
}

func (a *Agent) runOnce(ctx context.Context) error {
	if err := a.Start(); err != nil {
		return err
	}
	a.mu.Lock()
	p := a.process
	a.mu.Unlock()
	select {
	case <-ctx.Done():
		return a.Stop(context.WithoutCancel(ctx))
	case <-p.Done():
	}
	if replaced(p) {
		return errReplaced
	}
	if err := p.Exit(); err != nil {
		return fmt.Errorf("agent ended: %w; its log is %s", err, a.LogPath())
	}
	return fmt.Errorf("agent ended; its log is %s", a.LogPath())
}

// EndLeftovers ends the agents that an earlier owner of a directory left. The processes that they run for workspaces
// live on and are adopted.
func EndLeftovers(ctx context.Context, dir string, gentle time.Duration) (int, error) {
	return reap.EndAgents(ctx, dir, Program, gentle)
}

// End ends all processes that run below a directory of agents, workloads included.
func End(ctx context.Context, dir string, gentle time.Duration) (int, error) {
	return reap.End(ctx, dir, Program, gentle)
}
