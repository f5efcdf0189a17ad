package profiles

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/audit"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/failpoint"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pg"
)

// byItself is who brings the configured profile into its phases.
const byItself = "recovery"

// change is one transaction that changes versions, under the lock on their head: of several replicas and people one
// changes profiles at a time.
type change struct {
	book    *Book
	tx      pgx.Tx
	by      string
	reason  string
	entry   audit.Entry
	changed []*row
	pos     string
}

// do runs fn and appends an event for each version that it changed, with the audit entry; nothing if it changed none.
func (b *Book) do(ctx context.Context, by, reason string, entry audit.Entry,
	fn func(ctx context.Context, c *change) error,
) (*change, error) {
	var done *change
	err := pg.InTx(ctx, b.deps.Pool, func(ctx context.Context, tx pgx.Tx) error {
		c := &change{book: b, tx: tx, by: by, reason: reason, entry: entry}
		if _, err := pg.Value[int64](ctx, tx, lockHead); err != nil {
			return fmt.Errorf("lock profiles: %w", err)
		}
		if err := fn(ctx, c); err != nil {
			return err
		}
		done = c
		if len(c.changed) == 0 {
			return nil
		}
		return c.finish(ctx)
	})
	if err != nil {
		return nil, err
	}
	if err := failpoint.Hit("recovery.profile.after_commit"); err != nil {
		return nil, err
	}
	if len(done.changed) > 0 {
		b.deps.Wake.Notify()
		if err := b.Refresh(ctx); err != nil {
			// It was committed: the loop reads it.
			b.deps.Logger.WarnContext(ctx, "the profiles cannot be read after a change", obs.Err(err))
		}
	}
	return done, nil
}

func (c *change) finish(ctx context.Context) error {
	if _, err := pg.Exec(ctx, c.tx, raiseHead); err != nil {
		return fmt.Errorf("raise the revision of profiles: %w", err)
	}
	evs := make([]events.Event, len(c.changed))
	for i, r := range c.changed {
		evs[i] = r.event(c.book.deps.Default)
	}
	if _, err := events.Append(ctx, c.tx, evs...); err != nil {
		return fmt.Errorf("append events of profiles: %w", err)
	}
	var err error
	if c.pos, err = c.book.deps.Audit.Record(ctx, c.tx, c.entry); err != nil {
		return err
	}
	return failpoint.Hit("recovery.profile.before_commit")
}

// enter brings a version into a phase.
func (c *change) enter(ctx context.Context, r *row, phase string) error {
	next, err := pg.One[row](ctx, c.tx, enterPhase, r.ID, r.Version, phase, c.by, c.reason)
	if err != nil {
		return fmt.Errorf("change the phase of a profile: %w", err)
	}
	*r = next
	c.note(r)
	return failpoint.Hit("recovery.profile.phase")
}

// note keeps a row that was changed for its event.
func (c *change) note(r *row) {
	for i, old := range c.changed {
		if old.ID == r.ID {
			c.changed[i] = r
			return
		}
	}
	c.changed = append(c.changed, r)
}

// raise has the version of a name that is offered stand above all others of the name, by another number if need be:
// agents take no version whose number is not above that of theirs, and some may have one that was offered meanwhile, or
// in a history that the database has lost. r follows if it is that version.
func (c *change) raise(ctx context.Context, name string, r *row) error {
	offered, err := pg.One[row](ctx, c.tx, readInPhase, name, announced)
	if pg.IsNoRows(err) {
		offered, err = pg.One[row](ctx, c.tx, readInPhase, name, active)
	}
	if pg.IsNoRows(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read the offered profile: %w", err)
	}
	highest, err := pg.Value[int64](ctx, c.tx, readHighest, name)
	if err != nil {
		return fmt.Errorf("read the highest number of a profile: %w", err)
	}
	if offered.Number >= highest {
		return nil
	}
	number, err := pg.Value[int64](ctx, c.tx, drawNumber, name)
	if err != nil {
		return fmt.Errorf("draw the number of a profile: %w", err)
	}
	next, err := pg.One[row](ctx, c.tx, changeNumber, offered.ID, offered.Version, number)
	if err != nil {
		return fmt.Errorf("change the number of a profile: %w", err)
	}
	if r.ID != next.ID {
		r = &offered
	}
	*r = next
	c.note(r)
	return nil
}

// displace has the version of a name that is in a phase retire.
func (c *change) displace(ctx context.Context, name, phase string) error {
	former, err := pg.One[row](ctx, c.tx, readInPhase, name, phase)
	if pg.IsNoRows(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read the %s profile: %w", phase, err)
	}
	return c.enter(ctx, &former, retiring)
}

// announce makes a content the announced version of its name, unless it is announced or active already. Another one
// that was announced is retiring then: nodes may have taken it, and are offered this one.
func (c *change) announce(ctx context.Context, p *commonv1.Profile) (*row, error) {
	r, err := pg.One[row](ctx, c.tx, readOfContent, p.GetFingerprint())
	known := err == nil
	if !known && !pg.IsNoRows(err) {
		return nil, fmt.Errorf("look for the same profile: %w", err)
	}
	if !known || r.Phase != announced {
		if err := c.displace(ctx, p.GetName(), announced); err != nil {
			return nil, err
		}
	}
	if known && r.Phase != announced && r.Phase != active {
		if err := c.enter(ctx, &r, announced); err != nil {
			return nil, err
		}
	}
	if known {
		return &r, c.raise(ctx, r.Name, &r)
	}
	number, err := pg.Value[int64](ctx, c.tx, drawNumber, p.GetName())
	if err != nil {
		return nil, fmt.Errorf("draw the number of a profile: %w", err)
	}
	r, err = pg.One[row](ctx, c.tx, insertVersion, ids.New(), p.GetName(), number, p.GetFingerprint(), p.GetApiUrl(),
		p.GetRecoveryUrl(), p.GetTerminalUrl(), p.GetCaBundlePem(), p.GetRecoveryCaBundlePem(), c.by, c.reason)
	if err != nil {
		return nil, fmt.Errorf("insert profile: %w", err)
	}
	c.changed = append(c.changed, &r)
	return &r, failpoint.Hit("recovery.profile.phase")
}

// activate makes a version the active one of its name. The former one is retiring then.
func (c *change) activate(ctx context.Context, r *row) error {
	if r.Phase == active {
		return nil
	}
	if err := c.displace(ctx, r.Name, active); err != nil {
		return err
	}
	if err := c.enter(ctx, r, active); err != nil {
		return err
	}
	return c.raise(ctx, r.Name, r)
}

// find reads a version by its number.
func (c *change) find(ctx context.Context, name string, number, seen int64) (*row, error) {
	r, err := pg.One[row](ctx, c.tx, readOfNumber, name, number)
	if pg.IsNoRows(err) {
		return nil, fault.New(commonv1.Reason_REASON_PROFILE_UNKNOWN,
			fmt.Sprintf("there is no version %d of a profile %s", number, name),
			fault.Remedy("`gpuaas profiles list` has the numbers: a version that is offered again gets another one"))
	}
	if err != nil {
		return nil, fmt.Errorf("read profile: %w", err)
	}
	if seen != 0 && seen != r.Version {
		return nil, fault.New(commonv1.Reason_REASON_CONFLICT, "the version of the profile was changed meanwhile",
			fault.Unmet(fmt.Sprintf("row_seen: the version of the row is %d", r.Version)))
	}
	return &r, nil
}

// retireStale retires the versions of a name that a configuration has replaced a month ago and that no node reports, so
// that a file which changes often leaves few of them.
func (c *change) retireStale(ctx context.Context, name string) error {
	rows, err := pg.All[row](ctx, c.tx, readStale, name, byItself)
	if err != nil {
		return fmt.Errorf("read stale profiles: %w", err)
	}
	for i := range rows {
		if err := c.enter(ctx, &rows[i], retired); err != nil {
			return err
		}
	}
	return nil
}
