package project

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
)

// Owner is a service that can announce its live rows as events.
type Owner interface {
	AnnounceRows(ctx context.Context, req *commonv1.AnnounceRowsRequest) (*commonv1.AnnounceRowsResponse, error)
}

// rebuildCursor is the prefix of the name of a cursor that keeps events from being cut while a rebuild needs them.
const rebuildCursor = ConsumerName + ".rebuild/"

var (
	isCut = pg.Define(pg.RoleReadmodel, "project.is_cut", `SELECT EXISTS (
		SELECT FROM mesh.retention r WHERE r.service = 'readmodel' AND r.total > 0)
		OR COALESCE((SELECT n.before > 0 FROM events.numbered n ORDER BY n.last_pos LIMIT 1), false)`)
	keepEvents = pg.Define(pg.RoleReadmodel, "project.keep_events", `
		INSERT INTO readmodel.event_cursor (name, pos) VALUES ($1, 0)`)
	dropEvents = pg.Define(pg.RoleReadmodel, "project.drop_events", `DELETE FROM readmodel.event_cursor WHERE name = $1`)
	// The cursor of a rebuild whose process has died is deleted after an hour, so that events can be cut again.
	dropStaleKept = pg.Define(pg.RoleReadmodel, "project.drop_stale_kept", `
		DELETE FROM readmodel.event_cursor WHERE name LIKE $1 || '%' AND updated_at < mesh.clock() - interval '1 hour'`)
)

// announcement is the result of the owners' announcements.
type announcement struct {
	rows  int64
	after int64 // position of the cursor before the first
}

// applied returns an error if the rebuild lacks an announced row: merge would delete that row as one that neither an
// event nor an owner names.
func (a announcement) applied(ctx context.Context, tx pgx.Tx, report Report) error {
	parked, err := pg.Values[int64](ctx, tx, parkedPositions, ConsumerName)
	if err != nil {
		return fmt.Errorf("read parked events: %w", err)
	}
	parked = slices.DeleteFunc(parked, func(pos int64) bool { return pos <= a.after })
	if len(parked) == 0 && report.Unapplied == 0 {
		return nil
	}
	return fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED, fmt.Sprintf(
		"%d events cannot be applied, and of the live rows that were announced %d are set aside: they would be missing",
		report.Unapplied, len(parked)),
		fault.Unmet("every replica of readmodel is of the newest build that runs, and what is set aside is replayed or "+
			"dropped"))
}

// announceAll has the owners announce their live rows, and waits until they are projected.
func (p *Projector) announceAll(ctx context.Context, owners []Owner) (announcement, error) {
	var out announcement
	if len(owners) == 0 {
		return out, fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED,
			"the log does not begin at its beginning any more: history was cut at the end of its term",
			fault.Unmet("live rows are announced by the services that own them"))
	}
	var err error
	if out.after, err = pg.Value[int64](ctx, p.db, cursorPosition.For(false), ConsumerName); err != nil &&
		!pg.IsNoRows(err) {
		return out, fmt.Errorf("read cursor: %w", err)
	}
	for _, owner := range owners {
		for after := ""; ; {
			batch, err := owner.AnnounceRows(ctx, &commonv1.AnnounceRowsRequest{After: after})
			if err != nil {
				return out, fmt.Errorf("announce live rows: %w", err)
			}
			out.rows += batch.GetRows()
			// The next batch is requested once this one is projected, so that the projection keeps up with the owners.
			if err := p.reach(ctx, batch.GetPos()); err != nil {
				return out, err
			}
			if after = batch.GetNext(); after == "" {
				break
			}
		}
	}
	return out, nil
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

// DropDeadRebuilds deletes the cursors of rebuilds whose process has ended, so that the events that they kept can be
// cut.
func (p *Projector) DropDeadRebuilds(ctx context.Context) error {
	if _, err := pg.Exec(ctx, p.db, dropStaleKept, rebuildCursor); err != nil {
		return fmt.Errorf("drop cursors of earlier rebuilds: %w", err)
	}
	return nil
}

// keepEvents keeps all present events from being cut until the returned function is called.
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
