package agent

import (
	"context"
	"errors"

	"github.com/gpuaas/mesh/agent/meters"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/obs"
)

var errNoSession = errors.New("no session is admitted")

// openOps listens for metrics and health, if that is configured.
func (a *Agent) openOps(ctx context.Context) error {
	if a.cfg.OpsListen == "" {
		return nil
	}
	registry, err := obs.NewRegistry()
	if err != nil {
		return err
	}
	a.meters, err = meters.New(registry, meters.Sources{
		Connected: func() bool { return a.connected(ctx) == nil }, Unfinished: a.unfinished,
		Recovery: func() *commonv1.RecoveryCounters { return a.recovery.Counters() }, Recorded: a.diag.Entries,
	})
	if err != nil {
		return err
	}
	health := obs.NewHealth()
	health.Ready("session", a.connected)
	a.ops, err = obs.NewOpsServer(ctx, obs.OpsDeps{Logger: a.deps.Logger, Registry: registry, Health: health},
		a.cfg.OpsListen)
	return err
}

// unfinished returns the number of task attempts without an acknowledged result.
func (a *Agent) unfinished() int {
	a.mu.Lock()
	l := a.ledger
	a.mu.Unlock()
	if l == nil { // it could not be opened for the node as which this host was enrolled
		return 0
	}
	return l.Open()
}

func (a *Agent) connected(context.Context) error {
	if a.session() == nil {
		return errNoSession
	}
	return nil
}
