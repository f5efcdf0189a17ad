package process

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/mesh/agent/room"
	"github.com/gpuaas/mesh/agent/runtime/uid"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ports"
)

// DefaultGrace is the time between TERM and KILL.
const DefaultGrace = 10 * time.Second

// Config sets where workloads have their files, and their bounds. Zero values take the defaults named here.
type Config struct {
	// StateDir has specs, states, secrets and outputs. It is the agent's own, mode 0700.
	StateDir string
	// WorkDir holds the working directories of workloads without storage, and a copy of the agent's binary for demo
	// workloads. Workspaces must be able to traverse it, so no directory above it may be closed to others.
	WorkDir string
	// Executable runs shims. Default: this process's own binary.
	Executable string
	// NoRoot keeps the agent from giving workspaces their own uid. Default: whether the process is not root. Only tests of
	// that case set it.
	NoRoot bool
	// Cgroups are the control groups in which workloads run; see DetectCgroups.
	Cgroups Cgroups

	MaxPIDs    int           // of one workload. Default 4096
	LogBytes   int64         // of one output before it is rotated; one older piece is kept. Default 8 MiB
	BackoffMin time.Duration // before a restart. Default 1 s, doubled up to BackoffMax, 1 min
	BackoffMax time.Duration
	StartWait  time.Duration // for a shim's first report. Default 60 s
	CheckEvery time.Duration // of shims and states. Default 1 s
	CalmAfter  time.Duration // a run of this length does not count towards a crash loop. Default 1 min
	// GPUs of the host, to keep a workload from those it was not given, where the host can.
	GPUs []*commonv1.Gpu
}

func (c *Config) fill() {
	if c.Executable == "" {
		c.Executable = selfExecutable
	}
	if c.MaxPIDs <= 0 {
		c.MaxPIDs = 4096
	}
	if c.LogBytes <= 0 {
		c.LogBytes = 8 << 20
	}
	if c.BackoffMin <= 0 {
		c.BackoffMin = time.Second
	}
	if c.BackoffMax < c.BackoffMin {
		c.BackoffMax = max(time.Minute, c.BackoffMin)
	}
	if c.StartWait <= 0 {
		c.StartWait = time.Minute
	}
	if c.CheckEvery <= 0 {
		c.CheckEvery = time.Second
	}
	if c.CalmAfter <= 0 {
		c.CalmAfter = calmAfter
	}
	if os.Getuid() != 0 {
		c.NoRoot = true
	}
}

// Deps are what a Runtime needs.
type Deps struct {
	Logger *slog.Logger
	UIDs   *uid.Table
}

// DefaultCrashLoopRestarts is how many restarts make a crash loop until the control plane has sent its policy.
const DefaultCrashLoopRestarts = 3

// SetCrashLoopRestarts sets how many restarts in a row make a crash loop.
func (r *Runtime) SetCrashLoopRestarts(restarts int32) { r.crashLoop.Store(restarts) }

// Runtime runs workloads. It is safe for concurrent use. Workloads run on without it, under their shims.
type Runtime struct {
	cfg  Config
	deps Deps
	boot string

	problems  []string     // of New
	crashLoop atomic.Int32 // how many restarts make a crash loop

	mu        sync.Mutex // guards what follows; never held while waiting for anything
	workloads map[key]*workload
	claimed   map[int32]key             // picked ports
	listed    func(WorkspaceEpoch) bool // nil until the control plane has listed what may run here

	masks   maskCache
	changed chan struct{}
	shims   sync.WaitGroup // waits for the shims that this process started, so that they are reaped
}

type key struct{ workspaceID, name string }

// workload is the directory of one workload. mu serializes its operations.
type workload struct {
	key  key
	dir  string
	last string // digest of the last status that was reported as a change; guarded by Runtime.mu
	// mayStart is set once the workload ran, or was started by a task, while this agent ran: it is brought back when its
	// shim dies, whether or not its epoch is listed.
	mayStart atomic.Bool

	mu      sync.Mutex
	spec    spec
	want    desired
	present bool // a spec is on disk
	adopted bool // its shim was started by an earlier agent
	failed  string
}

// New reads the workloads that earlier agents left. It starts none; Run does.
func New(deps Deps, cfg Config) (*Runtime, error) {
	cfg.fill()
	if deps.Logger == nil || deps.UIDs == nil || cfg.StateDir == "" || cfg.WorkDir == "" {
		return nil, errors.New("make process runtime: logger, uid table, state or work directory is missing")
	}
	for _, d := range []struct {
		path string
		mode os.FileMode
	}{{cfg.StateDir, 0o700}, {cfg.WorkDir, 0o711}} {
		if err := os.MkdirAll(d.path, d.mode); err != nil {
			return nil, fmt.Errorf("make directory of process runtime: %w", err)
		}
		if err := os.Chmod(d.path, d.mode); err != nil {
			return nil, fmt.Errorf("close directory of process runtime: %w", err)
		}
	}
	r := &Runtime{
		cfg: cfg, deps: deps, boot: bootID(),
		workloads: map[key]*workload{}, claimed: map[int32]key{}, changed: make(chan struct{}, 1),
	}
	r.crashLoop.Store(DefaultCrashLoopRestarts)
	r.sweepCopies()
	if err := r.find(); err != nil {
		return nil, err
	}
	r.cfg.Cgroups.sweep(func(workspaceID, name string) bool { return r.workloads[key{workspaceID, name}] != nil })
	return r, nil
}

// find reads every workload's directory.
func (r *Runtime) find() error {
	spaces, err := os.ReadDir(r.cfg.StateDir)
	if err != nil {
		return fmt.Errorf("list workspaces: %w", err)
	}
	for _, ws := range spaces {
		if !ws.IsDir() || !validWorkspace(ws.Name()) {
			continue
		}
		names, err := os.ReadDir(filepath.Join(r.cfg.StateDir, ws.Name()))
		if err != nil {
			return fmt.Errorf("list workloads: %w", err)
		}
		for _, n := range names {
			if !validName(n.Name()) {
				continue
			}
			w := r.workload(key{ws.Name(), n.Name()})
			r.sweep(w.dir)
			if w.present, err = readFile(w.dir, fileSpec, &w.spec); err != nil {
				w.failed, w.present, w.spec = err.Error(), false, spec{UID: -1}
				r.problem(w, err)
				continue
			}
			if _, err := readFile(w.dir, fileDesired, &w.want); err != nil {
				w.want = wantedBy(w.state())
				r.problem(w, err)
			}
			w.adopted = w.state().Shim.alive()
			w.mayStart.Store(r.runs(w.state()))
			for _, p := range w.spec.Ports {
				if p.Picked {
					r.claimed[p.Port] = w.key
				}
			}
		}
	}
	return nil
}

// sweep removes leftovers of unfinished writes in a workload's directory. They must be older than leftoverAge: its shim
// may be writing a state just now.
func (r *Runtime) sweep(dir string) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return // reading the workload's files reports it
	}
	for _, entry := range entries {
		info, err := entry.Info()
		if err != nil || !unfinished(entry.Name()) || time.Since(info.ModTime()) < leftoverAge {
			continue
		}
		_ = os.Remove(filepath.Join(dir, entry.Name()))
	}
}

// sweepCopies removes copies of the agent's binary that were not finished.
func (r *Runtime) sweepCopies() {
	copies, err := filepath.Glob(filepath.Join(r.cfg.WorkDir, "bin", copyLeftover+"*"))
	if err != nil {
		return
	}
	for _, path := range copies {
		_ = os.Remove(path)
	}
}

// leftoverAge is longer than any write takes.
const leftoverAge = time.Minute

// problem adds a text for people about a workload that was found broken.
func (r *Runtime) problem(w *workload, err error) {
	r.problems = append(r.problems, fmt.Sprintf("workload %s of workspace %s: %v", w.key.name, w.key.workspaceID, err))
}

// Problems returns texts for people about what New found broken.
func (r *Runtime) Problems() []string { return slices.Clone(r.problems) }

// workload returns the entry of k, and makes one if there is none.
func (r *Runtime) workload(k key) *workload {
	r.mu.Lock()
	defer r.mu.Unlock()
	w, ok := r.workloads[k]
	if !ok {
		w = &workload{key: k, dir: filepath.Join(r.cfg.StateDir, k.workspaceID, k.name)}
		r.workloads[k] = w
	}
	return w
}

// state returns the state that the shim wrote last; the zero state if there is none that can be read.
func (w *workload) state() state {
	var s state
	if _, err := readFile(w.dir, fileState, &s); err != nil {
		return state{}
	}
	return s
}

// Request is a deploy with the fields of its task.
type Request struct {
	WorkspaceID string
	Epoch       int64
	OpSeq       int64
	Deploy      *nodev1.WorkloadDeploy
	Dir         string // of the storage that the deploy names; empty: a directory of its own
}

// Deploy makes and starts a workload, and returns its status once it executes. The same deploy again (spec, devices,
// storage, secrets, epoch) adopts the running workload; another spec, or a later epoch, replaces it; a lower epoch is
// fault task_superseded.
func (r *Runtime) Deploy(ctx context.Context, req Request) (*nodev1.WorkloadStatus, error) {
	if err := validate(req); err != nil {
		return nil, err
	}
	w := r.workload(key{req.WorkspaceID, req.Deploy.GetWorkload().GetName()})
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.present && req.Epoch < w.spec.Epoch {
		return nil, fault.New(commonv1.Reason_REASON_TASK_SUPERSEDED,
			"a later epoch of the workspace has deployed this workload")
	}
	digest, err := digestOf(req)
	if err != nil {
		return nil, err
	}
	if w.present && w.spec.Digest == digest && w.spec.Epoch == req.Epoch && w.want.Run && r.lives(w) {
		st := r.status(ctx, w)
		st.Adopted = true
		return st, nil
	}
	if w.present || w.failed != "" {
		if err := r.halt(ctx, w, DefaultGrace); err != nil {
			return nil, err
		}
	}
	next, err := r.build(ctx, w, req, digest)
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(w.dir, 0o700); err != nil {
		return nil, fmt.Errorf("make directory of workload: %w", err)
	}
	if err := writeFile(w.dir, fileSpec, next); err != nil {
		return nil, err
	}
	w.spec, w.present, w.failed = next, true, ""
	return r.begin(ctx, w)
}

// lives reports whether the workload runs, or is being brought back by its shim.
func (r *Runtime) lives(w *workload) bool {
	s := w.state()
	return s.Shim.alive() && s.BootID == r.boot && !s.Final
}

// Start starts a workload that was deployed. One that runs is left alone.
func (r *Runtime) Start(ctx context.Context, workspaceID, name string) (*nodev1.WorkloadStatus, error) {
	w, err := r.deployed(workspaceID, name)
	if err != nil {
		return nil, err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.present {
		return nil, absent(name)
	}
	if w.want.Run && r.lives(w) {
		return r.status(ctx, w), nil
	}
	if err := r.halt(ctx, w, DefaultGrace); err != nil {
		return nil, err
	}
	return r.begin(ctx, w)
}

// Stop ends a workload and all processes that it started. It stays deployed. Stopping a stopped workload succeeds.
func (r *Runtime) Stop(ctx context.Context, workspaceID, name string, grace time.Duration) (*nodev1.WorkloadStatus,
	error,
) {
	w, err := r.deployed(workspaceID, name)
	if err != nil {
		return nil, err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.present {
		return nil, absent(name)
	}
	if err := r.halt(ctx, w, grace); err != nil {
		return nil, err
	}
	return r.status(ctx, w), nil
}

// Restart stops and starts a workload.
func (r *Runtime) Restart(ctx context.Context, workspaceID, name string, grace time.Duration) (*nodev1.WorkloadStatus,
	error,
) {
	w, err := r.deployed(workspaceID, name)
	if err != nil {
		return nil, err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.present {
		return nil, absent(name)
	}
	if err := r.halt(ctx, w, grace); err != nil {
		return nil, err
	}
	return r.begin(ctx, w)
}

// Remove stops a workload and removes its spec, state, output and secrets. Removing a workload that is not deployed
// succeeds.
func (r *Runtime) Remove(ctx context.Context, workspaceID, name string, grace time.Duration) (*nodev1.WorkloadStatus,
	error,
) {
	gone := &nodev1.WorkloadStatus{Name: name, Phase: nodev1.WorkloadPhase_WORKLOAD_PHASE_ABSENT}
	w, err := r.deployed(workspaceID, name)
	if fault.Has(err, commonv1.Reason_REASON_NOT_FOUND) {
		return gone, nil
	}
	if err != nil {
		return nil, err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.present && w.failed == "" {
		return gone, nil
	}
	// Want of room is ignored here: on a full disk the order to stop cannot be written, and removing the workload makes
	// room.
	if err := r.halt(ctx, w, grace); err != nil && !room.IsFull(err) {
		return nil, err
	} else if err != nil {
		if err := r.end(ctx, w, grace); err != nil {
			return nil, err
		}
	}
	removeCgroups(w.spec.Cgroups)
	if err := os.RemoveAll(w.dir); err != nil {
		return nil, fmt.Errorf("remove workload: %w", err)
	}
	if err := os.RemoveAll(r.scratch(w.key)); err != nil {
		return nil, fmt.Errorf("remove working directory: %w", err)
	}
	_ = os.Remove(filepath.Dir(w.dir)) // the workspace's, if this was its last
	r.mu.Lock()
	for p, k := range r.claimed {
		if k == w.key {
			delete(r.claimed, p)
			ports.Release(int(p))
		}
	}
	r.mu.Unlock()
	w.spec, w.want, w.present, w.adopted, w.failed = spec{}, desired{}, false, false, ""
	w.mayStart.Store(false)
	r.notify()
	return gone, nil
}

// Status returns one workload, or all of a workspace if name is empty. One that is not there has the phase absent.
func (r *Runtime) Status(ctx context.Context, workspaceID, name string) ([]*nodev1.WorkloadStatus, error) {
	if !validWorkspace(workspaceID) {
		return nil, fault.New(commonv1.Reason_REASON_INVALID_ARGUMENT, "the workspace's id is malformed")
	}
	var out []*nodev1.WorkloadStatus
	for _, w := range r.list() {
		if w.key.workspaceID != workspaceID || (name != "" && w.key.name != name) {
			continue
		}
		if st := r.check(ctx, w); st != nil {
			out = append(out, st)
		}
	}
	if len(out) == 0 && name != "" {
		out = append(out, &nodev1.WorkloadStatus{Name: name, Phase: nodev1.WorkloadPhase_WORKLOAD_PHASE_ABSENT})
	}
	return out, nil
}

// Observe returns every workload of the host, by workspace, for Observation frames.
func (r *Runtime) Observe(ctx context.Context) map[string][]*nodev1.WorkloadStatus {
	out := map[string][]*nodev1.WorkloadStatus{}
	for _, w := range r.list() {
		if st := r.check(ctx, w); st != nil {
			out[w.key.workspaceID] = append(out[w.key.workspaceID], st)
		}
	}
	return out
}

// Changed returns a channel that gets a value when a workload changed its phase, pid, restarts or readiness, or entered
// or left a crash loop, since the last value was taken. Restarts within a crash loop are not changes.
func (r *Runtime) Changed() <-chan struct{} { return r.changed }

func (r *Runtime) notify() {
	select {
	case r.changed <- struct{}{}:
	default:
	}
}

// list returns the workloads in the order of their keys.
func (r *Runtime) list() []*workload {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := slices.Collect(maps.Values(r.workloads))
	slices.SortFunc(out, func(a, b *workload) int {
		return slices.Compare([]string{a.key.workspaceID, a.key.name}, []string{b.key.workspaceID, b.key.name})
	})
	return out
}

func (r *Runtime) deployed(workspaceID, name string) (*workload, error) {
	if !validWorkspace(workspaceID) || !validName(name) {
		return nil, fault.New(commonv1.Reason_REASON_INVALID_ARGUMENT,
			"the workspace's id or the workload's name is malformed")
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if w, ok := r.workloads[key{workspaceID, name}]; ok {
		return w, nil
	}
	return nil, absent(name)
}

func absent(name string) error {
	return fault.New(commonv1.Reason_REASON_NOT_FOUND, fmt.Sprintf("workload %q is not deployed on this node", name))
}

// digestOf returns the SHA-256 digest of a deploy, in hexadecimal. It covers the secrets, which cannot be derived from
// it.
func digestOf(req Request) (string, error) {
	data, err := proto.MarshalOptions{Deterministic: true}.Marshal(req.Deploy)
	if err != nil {
		return "", fmt.Errorf("digest of workload: %w", err)
	}
	sum := sha256.Sum256(append(data, req.Dir...))
	return hex.EncodeToString(sum[:]), nil
}
