package agent

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/mesh/agent/hostfacts"
	"github.com/gpuaas/mesh/agent/identity/enrol"
	"github.com/gpuaas/mesh/agent/runtime/process"
	"github.com/gpuaas/mesh/agent/session"
	"github.com/gpuaas/mesh/agent/task"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/observation"
)

// Bounds of one Observation frame.
const (
	maxWorkloads = 64
	maxStorages  = 64
)

func (a *Agent) jitter(bound time.Duration) time.Duration {
	if bound <= 0 {
		return 0
	}
	return rand.N(bound) // spread, not secrecy
}

func (a *Agent) enrolFacts() enrol.Facts {
	return enrol.Facts{
		AgentVersion: a.cfg.Version, BootID: a.facts.bootID(), Host: a.facts.now(), Profile: a.profile(),
		CorrelationID: a.diag.Correlation(),
	}
}

// hooks returns the session's hooks, which connect it with the executor, the workloads and the host's facts.
func (a *Agent) hooks(executor *task.Executor) session.Hooks {
	return session.Hooks{
		Hello: func(hello *nodev1.Hello) {
			hello.AgentVersion, hello.BootId, hello.LedgerId = a.cfg.Version, a.facts.bootID(), a.ledger.ID()
			hello.TaskTypes, hello.TasksInFlight = executor.Types(), executor.InFlight()
			hello.Profile, hello.Host = a.profile(), a.facts.takeAll()
			hello.Diagnostics = a.withDisk(a.helloDiagnostics())
			hello.Recovery = a.recovery.Counters()
		},
		Admitted: func(ctx context.Context, _ int64) {
			a.profileAdmitted(ctx)
			a.warn(ctx, "end of the failures not recorded", a.noted(a.recovery.ClearFailures()))
			a.noteTrust(ctx, true)
			a.meters.Session()
			executor.Attach(a.client)
			a.helloAccepted(ctx)
			a.wakeObserver()
		},
		RunList: func(ctx context.Context, list *nodev1.RunList) {
			a.runList(ctx, list)
			executor.Wake()
		},
		Trust: a.noteTrust,
		Lost: func() {
			a.diag.Lost()
			executor.Detach(a.client)
		},
		Offer: executor.Offer, Cancel: executor.Cancel, Acknowledged: executor.Ack, ReportRefused: executor.ReportRefused,
		Policy: func(policy *commonv1.NodePolicy) {
			a.policyReceived(policy)
			if restarts := policy.GetCrashLoopRestarts(); restarts > 0 {
				a.work.SetCrashLoopRestarts(restarts)
			}
		},
		TaskKeys:         a.verifiers.Store,
		ServiceRoots:     a.takeRoots,
		Output:           a.askOutput,
		Profile:          a.profileOffered,
		ProfileAnnounced: a.compareProfile,
		ChangedFacts:     a.facts.changed,
	}
}

// warn logs an error; nil is none.
func (a *Agent) warn(ctx context.Context, what string, err error) {
	if err != nil {
		//nolint:sloglint // the callers' messages are constants
		a.deps.Logger.LogAttrs(ctx, slog.LevelWarn, what, slog.Any("error", err))
	}
}

// session returns the client of the admitted session; nil if no session is admitted.
func (a *Agent) session() *session.Client {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.client == nil || a.client.Generation() == 0 {
		return nil
	}
	return a.client
}

// runList allows the runtime to start the workspaces' epochs on the control plane's list. An older control plane sends
// no list: its admission alone means that this node is not replaced, and every deployed workload may start.
func (a *Agent) runList(_ context.Context, list *nodev1.RunList) {
	if list == nil || list.GetUnlisted() {
		a.expected.set(nil)
		a.work.SetRunAll()
		return
	}
	epochs := make([]process.WorkspaceEpoch, 0, len(list.GetMayRun()))
	for _, e := range list.GetMayRun() {
		epochs = append(epochs, process.WorkspaceEpoch{WorkspaceID: e.GetWorkspaceId(), Epoch: e.GetEpoch()})
	}
	a.work.SetRunList(epochs)
	if node, _ := a.store.Node(); node.WorkspaceID == "" {
		// A launched instance that loses its directories is replaced as a whole, and reports nothing before its deployment.
		a.expected.set(list.GetMayRun())
	}
}

func (a *Agent) wakeObserver() {
	select {
	case a.nudge <- struct{}{}:
	default:
	}
}

// observe reports the workloads to the control plane: those that changed at once, all of them at the start of a session
// and every ObserveEvery.
func (a *Agent) observe(ctx context.Context) error {
	reported := map[string]observation.Digest{}
	full := time.NewTicker(a.cfg.ObserveEvery)
	defer full.Stop()
	for {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-a.work.Changed():
		case <-a.nudge:
			clear(reported)
		case <-full.C:
			clear(reported)
		}
		a.observeOnce(ctx, reported)
		if !app.Sleep(ctx, a.cfg.ObserveLeast) {
			return context.Cause(ctx)
		}
	}
}

// observeOnce queues an observation for each workspace whose last one differs. An observation that the session does not
// take is sent by a later call.
func (a *Agent) observeOnce(ctx context.Context, sent map[string]observation.Digest) {
	client := a.session()
	if client == nil {
		return
	}
	seen := a.work.Observe(ctx)
	missing := a.expected.missing(seen)
	leaveRunning(missing)
	for workspace := range missing {
		seen[workspace] = nil
	}
	for workspace := range sent {
		if _, still := seen[workspace]; !still {
			delete(sent, workspace)
			_ = client.Observe(&nodev1.Observation{WorkspaceId: workspace, ObservedAt: timestamppb.New(a.clock.Now())})
		}
	}
	for workspace, workloads := range seen {
		if len(workloads) > maxWorkloads {
			workloads = workloads[:maxWorkloads]
		}
		message := &nodev1.Observation{
			WorkspaceId: workspace, Workloads: workloads, Epoch: missing[workspace],
			Storage: a.observeStorage(ctx, workspace),
		}
		for _, w := range workloads {
			message.Epoch = max(message.GetEpoch(), w.GetEpoch())
		}
		digest, err := observation.Of(message)
		if err != nil {
			a.deps.Logger.LogAttrs(ctx, slog.LevelError, "observation not encoded", slog.Any("error", err))
			continue
		}
		if sent[workspace] == digest {
			continue
		}
		message.ObservedAt = timestamppb.New(a.clock.Now())
		if client.Observe(message) == nil {
			sent[workspace] = digest
		}
	}
}

// observeStorage returns which directories a workspace has. It returns nil if they cannot be read or are too many for
// one frame: a nil report is no evidence about them.
func (a *Agent) observeStorage(ctx context.Context, workspaceID string) *nodev1.StorageReport {
	present, err := a.disk.Names(workspaceID)
	if err != nil {
		a.deps.Logger.LogAttrs(ctx, slog.LevelWarn, "storage of a workspace not read, it is not reported",
			slog.String("workspace_id", workspaceID), slog.Any("error", err))
		return nil
	}
	if len(present) > maxStorages {
		return nil
	}
	return &nodev1.StorageReport{Names: present}
}

// facts holds the last facts of the host, and those that were last sent to the control plane.
type facts struct {
	cfg  hostfacts.Config
	mu   sync.Mutex
	seen *commonv1.HostFacts
	sent *commonv1.HostFacts
	room *commonv1.StateDisk
}

func (f *facts) refresh(ctx context.Context) {
	seen := hostfacts.Collect(ctx, f.cfg)
	f.mu.Lock()
	defer f.mu.Unlock()
	seen.StateDisk = f.room
	f.seen = seen
}

func (f *facts) bootID() string { return hostfacts.BootID(f.cfg) }

// setRoom puts the state of the disks into the facts.
func (f *facts) setRoom(found *commonv1.StateDisk) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.room = found
	if f.seen != nil {
		f.seen = proto.CloneOf(f.seen) // the message may have been sent already and must not change
		f.seen.StateDisk = found
	}
}

func (f *facts) now() *commonv1.HostFacts {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.seen
}

// takeAll returns all facts and marks them as sent.
func (f *facts) takeAll() *commonv1.HostFacts {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.sent = f.seen
	return f.seen
}

// changed returns the facts and marks them as sent, if they differ from those sent last; else nil.
func (f *facts) changed() *commonv1.HostFacts {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !hostfacts.Changed(f.sent, f.seen) {
		return nil
	}
	f.sent = f.seen
	return f.seen
}

func (a *Agent) watchFacts(ctx context.Context) error {
	for app.Sleep(ctx, a.cfg.FactsEvery) {
		a.facts.refresh(ctx)
	}
	return context.Cause(ctx)
}
