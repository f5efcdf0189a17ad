package mesh

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strconv"
	"time"

	"github.com/gpuaas/mesh/drill/kit/await"
	"github.com/gpuaas/mesh/drill/kit/host"
	"github.com/gpuaas/mesh/mesh/agents"
	"github.com/gpuaas/mesh/mesh/reap"
)

// Launches returns the launch log of a mesh of the drills' own.
func (m *Mesh) Launches() ([]host.Launch, error) {
	return host.ReadLaunches(filepath.Join(m.cluster.Plan.InstanceDir, "launches.jsonl"))
}

// InstanceDir returns the directory of an instance.
func (m *Mesh) InstanceDir(workspaceID string, epoch int64) string {
	return filepath.Join(m.cluster.Plan.InstanceDir, "boxes", workspaceID+"-"+strconv.FormatInt(epoch, 10))
}

// InstancePID returns the process of an instance's agent by the launch log: as launched, or as last powered on again.
func (m *Mesh) InstancePID(workspaceID string, epoch int64) (int, error) {
	ledger, err := m.Launches()
	if err != nil {
		return 0, err
	}
	pid := 0
	for _, l := range ledger {
		if l.WorkspaceID == workspaceID && l.Epoch == epoch && (l.Op == "launched" || l.Op == "restarted") {
			pid = l.PID
		}
	}
	if pid == 0 {
		return 0, errors.New("the ledger knows no launch of it")
	}
	return pid, nil
}

// OneLife checks that of all epochs of a workspace only this one has a live agent; zero: none has.
func (m *Mesh) OneLife(workspaceID string, epoch int64) error {
	dirs, err := filepath.Glob(filepath.Join(m.cluster.Plan.InstanceDir, "boxes", workspaceID+"-*"))
	if err != nil {
		return err
	}
	for _, dir := range dirs {
		procs, err := reap.Under(dir, agents.Program)
		if err != nil {
			return err
		}
		n := 0
		for _, p := range procs {
			if len(p.Args) > 1 && p.Args[1] == "run" {
				n++
			}
		}
		switch mine := dir == m.InstanceDir(workspaceID, epoch); {
		case mine && n != 1:
			return fmt.Errorf("%d agents run in the instance of epoch %d", n, epoch)
		case !mine && len(procs) > 0:
			return fmt.Errorf("%d processes run in %s, whose epoch is over", len(procs), filepath.Base(dir))
		}
	}
	return nil
}

// AwaitLaunch waits until the launch log has the launch of an instance and returns its agent's process. It polls often,
// so that the next step is not missed.
func (m *Mesh) AwaitLaunch(ctx context.Context, id string, epoch int64) (int, error) {
	var pid int
	err := await.Until(ctx, "the launch of the instance", await.Limit, func(context.Context) error {
		for range 20 {
			var err error
			if pid, err = m.InstancePID(id, epoch); err == nil {
				return nil
			}
			if err := await.Sleep(ctx, 2*time.Millisecond); err != nil {
				return err
			}
		}
		return errors.New("there is none")
	})
	return pid, err
}
