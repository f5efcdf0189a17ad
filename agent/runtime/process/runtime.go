package process

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gpuaas/mesh/agent/runtime/jsonfile"
	"github.com/gpuaas/mesh/agent/runtime/output"
	"github.com/gpuaas/mesh/agent/runtime/procfs"
	"github.com/gpuaas/mesh/internal/config"
)

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

	outputs output.Reader
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
	cfg = config.Or(cfg, defaults)
	cfg.BackoffMax = max(cfg.BackoffMax, cfg.BackoffMin)
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
		cfg: cfg, deps: deps, boot: procfs.BootID(),
		workloads: map[key]*workload{}, claimed: map[int32]key{}, changed: make(chan struct{}, 1),
	}
	r.crashLoop.Store(DefaultCrashLoopRestarts)
	r.sweepCopies()
	if err := r.find(); err != nil {
		return nil, err
	}
	r.cfg.Cgroups.Sweep(func(workspaceID, name string) bool { return r.workloads[key{workspaceID, name}] != nil })
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
			if w.present, err = jsonfile.Read(w.dir, fileSpec, &w.spec); err != nil {
				w.failed, w.present, w.spec = err.Error(), false, spec{UID: -1}
				r.problem(w, err)
				continue
			}
			if _, err := jsonfile.Read(w.dir, fileDesired, &w.want); err != nil {
				w.want = wantedBy(w.state())
				r.problem(w, err)
			}
			w.adopted = w.state().Shim.Alive()
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
		if err != nil || time.Since(info.ModTime()) < leftoverAge ||
			!jsonfile.Unfinished(entry.Name(), fileSpec, fileDesired, fileState, output.InfoFile) {
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
	if _, err := jsonfile.Read(w.dir, fileState, &s); err != nil {
		return state{}
	}
	return s
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
