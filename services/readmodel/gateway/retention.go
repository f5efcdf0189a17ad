package gateway

import (
	"context"
	"fmt"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/internal/retention"
)

// historySize is what the log and the database take, and since when an event is parked.
type historySize struct {
	Events       int64      `db:"events"`
	Database     int64      `db:"database"`
	OldestParked *time.Time `db:"oldest_parked"`
}

var readHistorySize = pg.Define(pg.RoleReadmodel, "gateway.history_size", `
	SELECT pg_total_relation_size('events.event') + pg_total_relation_size('events.numbered') AS events,
		pg_database_size(current_database()) AS database, mesh.oldest_parked() AS oldest_parked`)

// Retention serves RetentionService from the accounts that services keep.
type Retention struct {
	db     pg.Querier
	policy *policy.Source
}

// NewRetention makes the server. db logs in as readmodel.
func NewRetention(db pg.Querier, source *policy.Source) *Retention {
	return &Retention{db: db, policy: source}
}

// GetRetention shows what each service cuts, and what holds the event log.
func (r *Retention) GetRetention(ctx context.Context, _ *readmodelv1.GetRetentionRequest) (*readmodelv1.GetRetentionResponse, error) {
	if err := operatorsOnly(ctx); err != nil {
		return nil, err
	}
	accounts, err := retention.Accounts(ctx, r.db)
	if err != nil {
		return nil, err //nolint:wrapcheck // it says what it read
	}
	size, err := pg.One[historySize](ctx, r.db, readHistorySize)
	if err != nil {
		return nil, fmt.Errorf("read size of history: %w", err)
	}
	out := &readmodelv1.GetRetentionResponse{EventsBytes: size.Events, DatabaseBytes: size.Database, OldestParkedAt: stamp(size.OldestParked)}
	now := r.policy.Current()
	for _, a := range accounts {
		out.LagSeconds = max(out.GetLagSeconds(), int64(a.Lag.Seconds()))
		out.Cuts = append(out.Cuts, &readmodelv1.RetentionCut{
			Service: a.Service, Cut: a.Cut, PolicyKey: a.Key, TermSeconds: int64(now.Duration(a.Key).Seconds()), Rows: a.Total, LastRows: a.Last,
			BeganAt: timestamppb.New(a.BeganAt), DoneAt: stamp(a.DoneAt), OldestAt: stamp(a.Oldest), LagSeconds: int64(a.Lag.Seconds()), Failure: a.Failure,
		})
	}
	return out, nil
}

func stamp(at *time.Time) *timestamppb.Timestamp {
	if at == nil {
		return nil
	}
	return timestamppb.New(*at)
}
