package meshstatus

import (
	"context"
	"fmt"

	"google.golang.org/protobuf/types/known/timestamppb"

	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/internal/retention"
	"github.com/gpuaas/mesh/internal/wallclock"
	"github.com/gpuaas/mesh/services/readmodel/gateway/caller"
)

// Retention serves RetentionService from the records that each service keeps of what it cuts.
type Retention struct {
	db     pg.Querier
	policy *policy.Source
}

// NewRetention returns the server. db logs in as readmodel.
func NewRetention(db pg.Querier, source *policy.Source) *Retention {
	return &Retention{db: db, policy: source}
}

// GetRetention returns what each service cuts, and what keeps events from being cut.
func (r *Retention) GetRetention(ctx context.Context,
	_ *readmodelv1.GetRetentionRequest,
) (*readmodelv1.GetRetentionResponse, error) {
	if err := caller.OperatorsOnly(ctx); err != nil {
		return nil, err
	}
	accounts, err := retention.Accounts(ctx, r.db)
	if err != nil {
		return nil, err
	}
	size, err := pg.One[historySize](ctx, r.db, readHistorySize)
	if err != nil {
		return nil, fmt.Errorf("read size of history: %w", err)
	}
	out := &readmodelv1.GetRetentionResponse{
		EventsBytes: size.Events, DatabaseBytes: size.Database,
		OldestParkedAt: stamp(size.OldestParked),
	}
	now := r.policy.Current()
	for _, a := range accounts {
		out.LagSeconds = max(out.GetLagSeconds(), int64(a.Lag.Seconds()))
		out.Cuts = append(out.Cuts, &readmodelv1.RetentionCut{
			Service: a.Service, Cut: a.Cut, PolicyKey: a.Key, TermSeconds: int64(now.Duration(a.Key).Seconds()), Rows: a.Total,
			LastRows: a.Last, BeganAt: timestamppb.New(a.BeganAt), DoneAt: stamp(a.DoneAt), OldestAt: stamp(a.Oldest),
			LagSeconds: int64(a.Lag.Seconds()), Failure: a.Failure,
		})
	}
	consumers, err := readConsumers(ctx, r.db)
	if err != nil {
		return nil, err
	}
	if c := consumersComponent(consumers, wallclock.Now()); c != nil {
		out.Held, out.NextAction = c.GetDetail(), c.GetNextAction()
	}
	return out, nil
}
