package process

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/mesh/agent/room"
	"github.com/gpuaas/mesh/agent/runtime/isolation"
	"github.com/gpuaas/mesh/agent/runtime/jsonfile"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ports"
)

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
	if err := jsonfile.Write(w.dir, fileSpec, next); err != nil {
		return nil, err
	}
	w.spec, w.present, w.failed = next, true, ""
	return r.begin(ctx, w)
}

// lives reports whether the workload runs, or is being brought back by its shim.
func (r *Runtime) lives(w *workload) bool {
	s := w.state()
	return s.Shim.Alive() && s.BootID == r.boot && !s.Final
}

// Start starts a workload that was deployed. One that runs is left alone.
func (r *Runtime) Start(ctx context.Context, workspaceID, name string) (*nodev1.WorkloadStatus, error) {
	return r.operate(workspaceID, name, func(w *workload) (*nodev1.WorkloadStatus, error) {
		if w.want.Run && r.lives(w) {
			return r.status(ctx, w), nil
		}
		return r.restart(ctx, w, DefaultGrace)
	})
}

// Stop ends a workload and all processes that it started. It stays deployed. Stopping a stopped workload succeeds.
func (r *Runtime) Stop(ctx context.Context, workspaceID, name string, grace time.Duration) (*nodev1.WorkloadStatus,
	error,
) {
	return r.operate(workspaceID, name, func(w *workload) (*nodev1.WorkloadStatus, error) {
		if err := r.halt(ctx, w, grace); err != nil {
			return nil, err
		}
		return r.status(ctx, w), nil
	})
}

// Restart stops and starts a workload.
func (r *Runtime) Restart(ctx context.Context, workspaceID, name string, grace time.Duration) (*nodev1.WorkloadStatus,
	error,
) {
	return r.operate(workspaceID, name, func(w *workload) (*nodev1.WorkloadStatus, error) {
		return r.restart(ctx, w, grace)
	})
}

// restart stops and starts a workload. The caller holds w.mu.
func (r *Runtime) restart(ctx context.Context, w *workload, grace time.Duration) (*nodev1.WorkloadStatus, error) {
	if err := r.halt(ctx, w, grace); err != nil {
		return nil, err
	}
	return r.begin(ctx, w)
}

// operate calls do with a workload that is deployed, whose mu is held meanwhile.
func (r *Runtime) operate(workspaceID, name string, do func(*workload) (*nodev1.WorkloadStatus, error),
) (*nodev1.WorkloadStatus, error) {
	w, err := r.deployed(workspaceID, name)
	if err != nil {
		return nil, err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.present {
		return nil, absent(name)
	}
	return do(w)
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
	err = r.halt(ctx, w, grace)
	if room.IsFull(err) {
		err = r.end(ctx, w, grace)
	}
	if err != nil {
		return nil, err
	}
	isolation.RemoveCgroups(w.spec.Cgroups)
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
