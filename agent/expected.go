package agent

import (
	"sync"

	"github.com/gpuaas/mesh/agent/runtime/procfs"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
)

// expected are the workspaces that the control plane's last run list names and of which this host has shown nothing
// yet. That it has nothing of them is reported too: a host that lost its directories would otherwise say nothing of
// what was on it.
type expected struct {
	mu     sync.Mutex
	epochs map[string]int64
}

// set takes the run list of a session; nil: the control plane is of an earlier version and names nothing.
func (e *expected) set(list []*nodev1.WorkspaceEpoch) {
	epochs := make(map[string]int64, len(list))
	for _, w := range list {
		epochs[w.GetWorkspaceId()] = max(epochs[w.GetWorkspaceId()], w.GetEpoch())
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.epochs = epochs
}

// missing returns the epochs of the expected workspaces that are not among those seen. A workspace that was seen once
// is expected no longer: its end is reported as any change.
func (e *expected) missing(seen map[string][]*nodev1.WorkloadStatus) map[string]int64 {
	e.mu.Lock()
	defer e.mu.Unlock()
	out := map[string]int64{}
	for workspace, epoch := range e.epochs {
		if _, ok := seen[workspace]; ok {
			delete(e.epochs, workspace)
			continue
		}
		out[workspace] = epoch
	}
	return out
}

// leaveRunning takes out the workspaces of which a process runs on this host, though the agent knows nothing of it: its
// state was removed under it. A workload that runs must not be started a second time, so that a person has to look at
// it.
func leaveRunning(missing map[string]int64) {
	if len(missing) == 0 {
		return
	}
	asked := make(map[string]bool, len(missing))
	for workspace := range missing {
		asked[workspace] = true
	}
	for workspace := range procfs.Having("GPUAAS_WORKSPACE_ID", asked) {
		delete(missing, workspace)
	}
}
