package notify

import (
	"context"
	"fmt"
	"log/slog"

	"github.com/gpuaas/mesh/internal/pg"
)

var (
	lastTicket = pg.Define(pg.RoleReadmodel, "notify.last_ticket",
		`SELECT coalesce((SELECT max(d.ticket) FROM readmodel.impact_due d), 0)`)
	postpone = pg.Define(pg.RoleReadmodel, "notify.postpone", `
		UPDATE readmodel.impact_due d SET ticket = DEFAULT WHERE d.kind = $1 AND d.subject_id = $2 AND d.ticket = $3`)
)

// oneByOne works on at most a batch of subjects, each in a transaction of its own. One that cannot be worked on goes to
// the end of the queue, so that it keeps no other one waiting; the first such error is returned beside the result.
func (n *Notifier) oneByOne(ctx context.Context) (Result, error) {
	var sum Result
	last, err := pg.Value[int64](ctx, n.deps.DB, lastTicket)
	if err != nil {
		return sum, fmt.Errorf("read the queue of what may be touched: %w", err)
	}
	var failed error
	for range batch {
		r, at, err := n.round(ctx, 1)
		sum.add(r)
		switch {
		case at == nil, at.Ticket > last: // what was postponed comes again
			if failed == nil {
				failed = err
			}
			return sum, failed
		case err == nil:
		case ctx.Err() != nil || pg.IsConnError(err):
			return sum, err
		default:
			n.changes.WithLabelValues("postponed").Inc()
			n.deps.Logger.ErrorContext(ctx, "whether a fault touches a workspace could not be read: it is tried again later",
				slog.String("kind", at.Kind), slog.String("id", at.ID), slog.String("error", err.Error()))
			if failed == nil {
				failed = err
			}
			if _, err := pg.Exec(ctx, n.deps.DB, postpone, at.Kind, at.ID, at.Ticket); err != nil {
				return sum, fmt.Errorf("postpone what may be touched: %w", err)
			}
		}
	}
	return sum, failed
}

func (r *Result) add(more Result) {
	r.Subjects, r.Workspaces = r.Subjects+more.Subjects, r.Workspaces+more.Workspaces
	r.late = r.late || more.late
	r.Began, r.Changed, r.Ended = r.Began+more.Began, r.Changed+more.Changed, r.Ended+more.Ended
}
