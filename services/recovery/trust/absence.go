package trust

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/recovery/trust/absence"
)

// Stop is a time in which no certificate is issued.
type Stop struct {
	From   time.Time
	Until  time.Time // zero: it lasts
	Reason string    // for people
}

// noteAbsence counts a check of the authority, and passes on when its absence begins to count, that it goes on, and
// when it is over, unless this replica has lost the lease meanwhile.
func (p *Preflight) noteAbsence(ctx context.Context, c *check) error {
	if p.deps.Unanswered == nil || c.err == nil && c.authority == nil { // the authority was not asked
		return nil
	}
	s := p.absence.Add(c.err != nil, c.authority != nil, c.at)
	if s == (absence.Stop{}) {
		return nil
	}
	if err := pg.InTx(ctx, p.deps.Pool, func(ctx context.Context, tx pgx.Tx) error {
		if held, err := pg.Value[bool](ctx, tx, hasLease, p.deps.Replica); err != nil || !held {
			return err
		}
		return p.deps.Unanswered(ctx, tx, s)
	}); err != nil {
		return fmt.Errorf("record absence of the authority: %w", err)
	}
	p.absence.Recorded(s)
	if c.err != nil && !s.GoesOn {
		p.deps.Logger.WarnContext(ctx, "the authority does not answer or does not sign: recovery tokens do not age",
			slog.Time("since", s.From), obs.Err(c.err))
	}
	return nil
}
