package project

import (
	"context"
	"errors"
	"fmt"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
)

// Owner announces the live rows of one service.
type Owner interface {
	AnnounceRows(ctx context.Context, req *commonv1.AnnounceRowsRequest) (*commonv1.AnnounceRowsResponse, error)
}

// rebuildCursor begins the name of a cursor that keeps events from being cut while a rebuild needs them.
const rebuildCursor = ConsumerName + ".rebuild/"

var (
	isCut = pg.Define(pg.RoleReadmodel, "project.is_cut", `SELECT EXISTS (
		SELECT FROM mesh.retention r WHERE r.service = 'readmodel' AND r.total > 0)
		OR COALESCE((SELECT n.before > 0 FROM events.numbered n ORDER BY n.last_pos LIMIT 1), false)`)
	keepEvents = pg.Define(pg.RoleReadmodel, "project.keep_events", `
		INSERT INTO readmodel.event_cursor (name, pos) VALUES ($1, 0)`)
	dropEvents = pg.Define(pg.RoleReadmodel, "project.drop_events", `DELETE FROM readmodel.event_cursor WHERE name = $1`)
	// A rebuild that has died keeps events no longer.
	dropStaleKept = pg.Define(pg.RoleReadmodel, "project.drop_stale_kept", `
		DELETE FROM readmodel.event_cursor WHERE name LIKE $1 || '%' AND updated_at < mesh.clock() - interval '1 hour'`)
)

// announceAll has the owners announce their live rows, and waits until they are projected. It returns how many there
// were.
func (p *Projector) announceAll(ctx context.Context, owners []Owner) (int64, error) {
	if len(owners) == 0 {
		return 0, fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED, "the log does not begin at its beginning any more: history was cut at the end of its term",
			fault.Unmet("live rows are announced by the services that own them"))
	}
	total := int64(0)
	for _, owner := range owners {
		for after := ""; ; {
			batch, err := owner.AnnounceRows(ctx, &commonv1.AnnounceRowsRequest{After: after})
			if err != nil {
				return total, fmt.Errorf("announce live rows: %w", err)
			}
			total += batch.GetRows()
			// One batch at a time is under way: the projections keep up with the owners.
			if err := p.reach(ctx, batch.GetPos()); err != nil {
				return total, err
			}
			if after = batch.GetNext(); after == "" {
				break
			}
		}
	}
	return total, nil
}

// reach waits until an event is projected, for as long as ctx allows.
func (p *Projector) reach(ctx context.Context, token string) error {
	for token != "" {
		err := p.consumer.WaitFor(ctx, token)
		if err == nil {
			return nil
		}
		if !errors.Is(err, events.ErrBehind) || ctx.Err() != nil {
			return fmt.Errorf("wait for announced rows: %w", err)
		}
	}
	return nil
}

// DropDeadRebuilds lets events be cut again that a rebuild kept whose process has ended.
func (p *Projector) DropDeadRebuilds(ctx context.Context) error {
	if _, err := pg.Exec(ctx, p.db, dropStaleKept, rebuildCursor); err != nil {
		return fmt.Errorf("drop cursors of earlier rebuilds: %w", err)
	}
	return nil
}

// keepEvents keeps every event that stands from being cut, until the function that it returns is called.
func (p *Projector) keepEvents(ctx context.Context) (func(context.Context) error, error) {
	if err := p.DropDeadRebuilds(ctx); err != nil {
		return nil, err
	}
	name := rebuildCursor + ids.New()
	if _, err := pg.Exec(ctx, p.db, keepEvents, name); err != nil {
		return nil, fmt.Errorf("keep events from being cut: %w", err)
	}
	return func(ctx context.Context) error {
		if _, err := pg.Exec(context.WithoutCancel(ctx), p.db, dropEvents, name); err != nil {
			return fmt.Errorf("let events be cut again: %w", err)
		}
		return nil
	}, nil
}
