package trust

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pg"
)

// absentAfter is how many checks in a row must find that the authority does not answer or does not sign.
const absentAfter = 3

// absence is what the checks have found of an authority that does not answer or does not sign. It is of one holder of
// the lease: another begins anew, and ends what one before has begun.
type absence struct {
	failures int       // in a row
	from     time.Time // of the first of them
	begun    bool      // a stop was written
	present  bool      // no stop lasts
}

// noteAbsence counts a check. It writes when the absence of the authority begins to count and when it is over.
func (p *Preflight) noteAbsence(ctx context.Context, c *check) error {
	a := &p.absence
	if c.err == nil {
		a.failures = 0
		if c.authority == nil || a.present {
			return nil
		}
		if err := p.unanswered(ctx, Stop{Until: c.at}); err != nil {
			return err
		}
		*a = absence{present: true}
		return nil
	}
	if a.failures == 0 {
		a.from = c.at
	}
	a.failures++
	if a.failures < absentAfter || a.begun {
		return nil
	}
	a.present = false
	if err := p.unanswered(ctx, Stop{From: a.from, Reason: c.err.Error()}); err != nil {
		return err
	}
	a.begun = true
	p.deps.Logger.WarnContext(ctx, "the authority does not answer or does not sign: recovery tokens do not age",
		slog.Time("since", a.from), obs.Err(c.err))
	return nil
}

// unanswered passes a stop on, unless this replica has lost the lease meanwhile.
func (p *Preflight) unanswered(ctx context.Context, s Stop) error {
	if p.deps.Unanswered == nil {
		return nil
	}
	err := pg.InTx(ctx, p.deps.Pool, func(ctx context.Context, tx pgx.Tx) error {
		if held, err := pg.Value[bool](ctx, tx, holdsLease, p.deps.Replica); err != nil || !held {
			return err
		}
		return p.deps.Unanswered(ctx, tx, s)
	})
	if err != nil {
		return fmt.Errorf("record absence of the authority: %w", err)
	}
	return nil
}
