package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gpuaas/mesh/agent/attempts"
	"github.com/gpuaas/mesh/agent/clock"
	"github.com/gpuaas/mesh/agent/diag"
	"github.com/gpuaas/mesh/agent/hostfacts"
	"github.com/gpuaas/mesh/agent/identity"
	"github.com/gpuaas/mesh/agent/identity/enrol"
	"github.com/gpuaas/mesh/agent/ledger"
	"github.com/gpuaas/mesh/agent/meters"
	"github.com/gpuaas/mesh/agent/room"
	"github.com/gpuaas/mesh/agent/runtime/isolation"
	"github.com/gpuaas/mesh/agent/runtime/process"
	"github.com/gpuaas/mesh/agent/runtime/uid"
	"github.com/gpuaas/mesh/agent/session"
	"github.com/gpuaas/mesh/agent/storage"
	"github.com/gpuaas/mesh/agent/task"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/envelope"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/wallclock"
)

// ErrReplaced means that the epoch of this instance has ended or was replaced by a later one: it must not be started
// again.
var ErrReplaced = errors.New("the epoch of this instance is over")

// Deps are what an Agent needs.
type Deps struct {
	Logger *slog.Logger
}

// Agent is one node agent, with all parts that New has opened.
type Agent struct {
	cfg    Config
	deps   Deps
	clock  *clock.Clock
	store  *identity.Store
	diag   *diag.Log
	enrol  *enrol.Enroller
	ledger *ledger.Ledger
	work   *process.Runtime
	disk   *storage.Store
	facts  *facts
	room   *room.Watch
	spare  *room.Reserve
	ops    *obs.OpsServer
	meters *meters.Meters

	recovery *attempts.Governor
	// operatorFailed is set after an enrolment with an operator's token failed; the session's loop alone has it.
	operatorFailed bool
	refusals       refusals
	verifiers      atomic.Pointer[envelope.VerifierSet]
	executor       chan *task.Executor // sent once, by the session's loop to the tasks' loop
	mu             sync.Mutex          // guards what follows, and ledger until there are tasks
	tasks          *task.Executor
	client         *session.Client
	inHello        []diag.Entry // the entries of the record in the last Hello
	nudge          chan struct{}
	outputs        chan *nodev1.OutputRequest
	offers         chan *commonv1.Profile // the newest profile that was offered
	roots          *pki.Bundle            // trusts the node API; nil until there is an identity
	over           dialled
	profileDrift   profileDrift
	expected       expected
}

// New opens everything that this agent owns on its host, and reports all problems of cfg. Another agent on the same
// directory is *identity.LockedError. Close ends what New opened.
func New(ctx context.Context, deps Deps, cfg Config) (*Agent, error) {
	cfg = cfg.withDefaults()
	_, offsetErr := wallclock.Offset()
	root, rootErr := hostfacts.RootFromEnvironment()
	if deps.Logger == nil {
		return nil, errors.New("agent: no logger")
	}
	if err := errors.Join(cfg.Validate(), offsetErr, rootErr); err != nil {
		return nil, &ConfigError{err}
	}
	a := &Agent{
		cfg: cfg, deps: deps, clock: clock.Shifted(wallclock.Shift()), executor: make(chan *task.Executor, 1),
		nudge:   make(chan struct{}, 1),
		outputs: make(chan *nodev1.OutputRequest, outputsWaiting),
		offers:  make(chan *commonv1.Profile, 1),
		facts: &facts{cfg: hostfacts.Config{
			Root: root, Paths: []string{cfg.WorkDir}, SimulatedGPUs: cfg.SimulatedGPUs,
		}},
	}
	if err := a.open(ctx); err != nil {
		a.recordExit(ctx, err)
		return nil, errors.Join(err, a.Close())
	}
	return a, nil
}

func (a *Agent) open(ctx context.Context) error {
	if err := a.openRoom(ctx); err != nil {
		return err
	}
	var err error
	if a.store, err = identity.Open(identity.Dirs{Etc: a.cfg.EtcDir, State: a.cfg.StateDir},
		identity.WithRoom(a.spare)); err != nil {
		return err
	}
	if unknown := a.store.Env().Unknown(); len(unknown) > 0 {
		a.deps.Logger.LogAttrs(ctx, slog.LevelWarn, "variables that this agent does not read", slog.Any("names", unknown))
	}
	if err := a.openDiagnostics(ctx); err != nil {
		return err
	}
	a.problems(ctx, "identity", a.store.Problems())
	if err := a.openRecovery(ctx); err != nil {
		return err
	}
	node, _ := a.store.Node()
	if a.ledger, err = a.openLedger(ctx, node.NodeID); err != nil {
		return err
	}
	if err := a.openHost(ctx); err != nil {
		return err
	}
	if a.enrol, err = enrol.New(enrol.Deps{
		Logger: a.deps.Logger, Store: a.store, Clock: a.clock, Facts: a.enrolFacts,
		Record: func(_ context.Context, code commonv1.DiagnosticCode, detail string, next time.Duration) (diag.Entry, error) {
			a.meters.Retry(code)
			kept, err := a.diag.Record(code, detail, next)
			return kept, a.noted(err)
		},
	}, a.cfg.Enrol); err != nil {
		return err
	}
	return a.openOps(ctx)
}

// openLedger opens the task ledger as the node's. With an empty id the ledger is bound to no node until there is one.
func (a *Agent) openLedger(ctx context.Context, nodeID string) (*ledger.Ledger, error) {
	l, err := ledger.Open(ledger.Config{
		Path: filepath.Join(a.cfg.StateDir, LedgerFile), NodeID: nodeID, MoveCorruptAside: !a.cfg.KeepCorruptLedger,
		Now:    a.clock.Wall,
		Failed: a.room.Note,
	})
	if err != nil {
		return nil, err
	}
	if l.MovedAside() != "" {
		what := "it could not be read"
		if l.Foreign() != "" {
			what = "it is node " + l.Foreign() + "'s"
		}
		a.deps.Logger.LogAttrs(ctx, slog.LevelError, "task ledger set aside, a new one begins", slog.String("cause", what),
			slog.String("file", l.MovedAside()), slog.String("ledger_id", l.ID()))
		a.record(ctx, commonv1.DiagnosticCode_DIAGNOSTIC_CODE_LEDGER_SET_ASIDE, what+": "+l.MovedAside(), 0)
	}
	return l, nil
}

// bindLedgerLocked makes the ledger the node's, where it was opened before there was one.
func (a *Agent) bindLedgerLocked(ctx context.Context, nodeID string) error {
	if a.ledger != nil {
		if a.ledger.NodeID() == nodeID {
			return nil
		}
		if err := a.ledger.Close(); err != nil {
			return &ledgerError{err}
		}
	}
	var err error
	if a.ledger, err = a.openLedger(ctx, nodeID); err != nil { // the ledger is nil then
		return &ledgerError{err}
	}
	return nil
}

// ledgerError means that the task ledger cannot be made the node's.
type ledgerError struct{ cause error }

func (e *ledgerError) Error() string { return e.cause.Error() }
func (e *ledgerError) Unwrap() error { return e.cause }

// openHost opens the parts that touch workspaces: uids, host facts, the workload runtime and storage.
func (a *Agent) openHost(ctx context.Context) error {
	root := os.Getuid() == 0
	if strings.HasPrefix(filepath.Clean(a.cfg.WorkDir)+"/", filepath.Clean(a.cfg.StateDir)+"/") {
		// Workspaces pass through the state directory; every file in it is closed to them.
		const passable = 0o711
		if err := os.Chmod(a.cfg.StateDir, passable); err != nil {
			return fmt.Errorf("open state directory to traversal: %w", err)
		}
	}
	workloads, runs, data := filepath.Join(a.cfg.StateDir, "workloads"), filepath.Join(a.cfg.WorkDir, "run"),
		filepath.Join(a.cfg.WorkDir, "storage")
	uids, err := uid.Open(uid.Config{
		Dir: a.cfg.UIDDir, Disabled: !root,
		Roots: []string{workloads, filepath.Join(runs, "work"), data},
	})
	if err != nil {
		return err
	}
	state, _ := a.room.Check()
	a.facts.setRoom(diskOf(state))
	a.facts.refresh(ctx)
	if a.work, err = process.New(process.Deps{Logger: a.deps.Logger, UIDs: uids}, process.Config{
		StateDir: workloads, WorkDir: runs,
		Cgroups: isolation.DetectCgroups(a.cfg.StateDir), GPUs: a.facts.now().GetGpus(),
	}); err != nil {
		return err
	}
	a.problems(ctx, "workload", a.work.Problems())
	if a.disk, err = storage.New(storage.Deps{Logger: a.deps.Logger, UIDs: uids, Quota: storage.ProjectQuota{}},
		storage.Config{
			Root: data, MetaDir: filepath.Join(a.cfg.StateDir, "storage"),
		}); err != nil {
		return err
	}
	if root {
		if err := isolation.CheckReachable(a.cfg.WorkDir); err != nil {
			a.deps.Logger.LogAttrs(ctx, slog.LevelWarn, "workspaces cannot reach their directories", slog.Any("error", err))
		}
	}
	// again, since the directories are there now: the facts of the first session stand until something changes
	a.facts.refresh(ctx)
	return nil
}

// Close closes what New opened. Workloads go on.
func (a *Agent) Close() error {
	var problems []error
	if a.ops != nil {
		problems = append(problems, a.ops.Close())
	}
	if a.disk != nil {
		problems = append(problems, a.disk.Close())
	}
	a.mu.Lock()
	l := a.ledger
	a.mu.Unlock()
	if l != nil {
		problems = append(problems, l.Close())
	}
	if a.store != nil {
		problems = append(problems, a.store.Close())
	}
	return errors.Join(problems...)
}

// OpsAddr returns the address on which metrics and health are served; empty without OpsListen.
func (a *Agent) OpsAddr() string {
	if a.ops == nil {
		return ""
	}
	return a.ops.Addr()
}

// Run works until ctx ends (nil; workloads go on), or until this instance is replaced (ErrReplaced; its workloads are
// stopped first), and closes what New opened. It is called once.
func (a *Agent) Run(ctx context.Context) error {
	tasks := []app.Task{
		{Name: "session", Phase: app.PhaseDrain, Run: a.stayEnrolled},
		{Name: "tasks", Phase: app.PhaseLoops, Run: a.execute},
		{Name: "workloads", Phase: app.PhaseLoops, Run: a.work.Run},
		{Name: "observations", Phase: app.PhaseLoops, Run: a.observe},
		{Name: "outputs", Phase: app.PhaseLoops, Run: a.readOutputs},
		{Name: "profiles", Phase: app.PhaseLoops, Run: a.takeProfiles},
		{Name: "facts", Phase: app.PhaseLoops, Run: a.watchFacts},
		{Name: "room", Phase: app.PhaseLoops, Run: a.watchRoom},
		{Name: "diagnostics", Phase: app.PhaseLoops, Run: a.report},
		{Name: "alive", Phase: app.PhaseLoops, Run: a.signOfLife},
	}
	if a.ops != nil {
		tasks = append(tasks, app.Task{Name: "ops", Phase: app.PhasePools, Run: a.ops.Run})
	}
	err := app.Run(ctx, a.deps.Logger, tasks...)
	a.ops = nil // its task has closed it
	return errors.Join(err, a.Close())
}

// Enrol makes this host a node, with an operator's bundle if one is named, and returns once it holds a certificate. A
// bundle that this host has enrolled with before changes nothing: that is no error while the identity made with it is
// whole. It must not be called while Run runs.
func (a *Agent) Enrol(ctx context.Context, bundle Bundle) error {
	if bundle.Path != "" {
		err := a.takeBundle(ctx, bundle)
		if errors.Is(err, identity.ErrBundleSpent) {
			return a.bundleSpent(ctx)
		}
		if err != nil {
			return err
		}
	}
	if err := a.store.Env().Validate(); err != nil {
		return err
	}
	if a.store.Token() == "" {
		if a.store.Certificate() != nil {
			return nil
		}
		if a.mayRecover() {
			return fmt.Errorf("%w: start the agent, which recovers by itself with the recovery token that is held",
				enrol.ErrNoToken)
		}
		return enrol.ErrNoToken
	}
	if err := a.enrol.Run(ctx); err != nil {
		return a.replaced(ctx, a.restoreAfter(ctx, bundle, err))
	}
	return a.recovery.ClearFailures()
}

// Node returns the identity of this host; false before its first enrolment.
func (a *Agent) Node() (identity.Node, bool) { return a.store.Node() }

// execute runs the tasks once there is a node to run them for.
func (a *Agent) execute(ctx context.Context) error {
	select {
	case executor := <-a.executor:
		return executor.Run(ctx)
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// prepare makes the parts that need an identity, once, and loads the task verifiers again, which a new enrolment may
// have changed. Without any, no task is accepted.
func (a *Agent) prepare(ctx context.Context, roots *pki.Bundle) error {
	verifiers, err := a.store.TaskKeys()
	if err != nil {
		return err
	}
	a.verifiers.Store(verifiers)
	node, ok := a.store.Node()
	if !ok {
		return errors.New("this host is no node yet")
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.tasks != nil {
		return nil
	}
	if err := a.bindLedgerLocked(ctx, node.NodeID); err != nil {
		return err
	}
	executor, err := task.New(task.Deps{
		Logger: a.deps.Logger, Ledger: a.ledger, Verifiers: a.verifiers.Load, ServerNow: a.clock.Server,
		Handlers: withheld(task.Handlers(task.HandlerDeps{
			Runtime: a.work, Storage: a.disk, Diagnostics: a.diag, BootID: a.facts.bootID(), Now: a.clock.Wall, Room: a.noRoom,
			NoRoom: a.room.Note, MayRun: a.work.MayRun,
		})),
		Listed:  a.work.Listed,
		Refused: func(r task.Refusal) { a.refusedTask(ctx, r) },
	}, task.Config{NodeID: node.NodeID})
	if err != nil {
		return err
	}
	client, err := session.New(session.Deps{
		Logger:   a.deps.Logger.With(slog.String("node_id", node.NodeID), slog.String("node_instance_id", node.InstanceID)),
		Identity: a.store, Clock: a.clock, Roots: roots,
		Endpoint: a.endpoint,
		Record: func(ctx context.Context, d session.Diagnostic) (diag.Entry, error) {
			a.meters.Retry(d.Code)
			kept, err := a.diag.Record(d.Code, d.Detail, d.NextRetry)
			a.noteStrayed(ctx, d)
			return kept, a.noted(err)
		},
		Hooks: a.hooks(executor),
	}, a.cfg.Session)
	if err != nil {
		return err
	}
	a.tasks, a.client, a.roots = executor, client, roots
	a.executor <- executor
	a.deps.Logger.LogAttrs(ctx, slog.LevelInfo, "node ready to connect", slog.String("node_id", node.NodeID),
		slog.String("ledger_id", a.ledger.ID()))
	return nil
}
