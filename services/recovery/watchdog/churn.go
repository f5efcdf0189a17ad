package watchdog

import (
	"context"
	"fmt"
	"strings"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/services/recovery/churn"
	"github.com/gpuaas/mesh/services/recovery/fleet"
)

func (r *record) target() churn.Target {
	return churn.Target{WorkspaceID: r.WorkspaceID, Placement: r.Placement}
}

// readBudget returns the budgets of the open records. It reads them once a round, and locks them if the round may
// write.
func (j *evaluation) readBudget(ctx context.Context) (*churn.Budgets, error) {
	if j.budget != nil {
		return j.budget, nil
	}
	targets := make([]churn.Target, 0, len(j.records))
	for _, r := range j.records {
		targets = append(targets, r.target())
	}
	var err error
	j.budget, err = churn.Read(ctx, j.tx, j.now, j.fleet.Writes() == nil, targets)
	return j.budget, err
}

// take takes a token from the budgets of a record and returns nil; or it takes none and returns the one to wait for.
func (j *evaluation) take(ctx context.Context, r *record) (*churn.Wait, error) {
	instances, err := j.fleet.Instances(ctx, r.Placement)
	if err != nil {
		return nil, err
	}
	budget, err := j.readBudget(ctx)
	if err != nil {
		return nil, err
	}
	rate := churn.RateOf(j.rate, j.fleet.Fraction(), instances)
	if wait := budget.Wait(r.target(), rate); wait != nil {
		return wait, nil
	}
	if err := j.fleet.Writes(); err != nil {
		return nil, err
	}
	budget.Take(r.target(), rate)
	return nil, nil
}

// budgets keeps one incident open for each budget that is used up, for as long as a recovery waits for it.
func (j *evaluation) budgets(ctx context.Context) error {
	waiting := map[string][]*record{}
	for _, r := range j.records {
		if r.EndedAt == nil && (strings.HasPrefix(r.WithheldBy, churn.ScopeWorkspace+":") ||
			strings.HasPrefix(r.WithheldBy, churn.ScopePlacement+":")) {
			waiting[r.WithheldBy] = append(waiting[r.WithheldBy], r)
		}
	}
	raised := make(map[string]*fleet.Incident, len(waiting))
	for by, list := range waiting {
		i := &fleet.Incident{
			Kind: kindChurn, Key: by, OwnerLayer: commonv1.OwnerLayer_OWNER_LAYER_DEPLOY,
			NextAction: "find out why recreating did not last: `gpuaas workspaces recoveries WS` and the timeline; then " +
				"recreate by hand or decommission",
		}
		for _, r := range list {
			i.About(r.TenantID, r.WorkspaceID, r.NodeID)
			i.Step, i.ErrorCode = r.Step, r.ErrorCode
		}
		i.Summary = "workspace " + list[0].Workspace + " has used up its recreations of this hour and needs another"
		if placement, ok := strings.CutPrefix(by, churn.ScopePlacement+":"); ok {
			i.Summary = fmt.Sprintf("placement %s has used up its recreations of this hour, and %d workspaces wait", placement,
				len(list))
		}
		raised[by] = i
	}
	return j.fleet.RaiseAll(ctx, kindChurn, raised, func(*fleet.Incident) bool { return false })
}
