package audit

import (
	"context"
	"log/slog"
	"time"

	"github.com/gpuaas/mesh/internal/obs"
)

const (
	// maxKinds is how many kinds of refusals of one actor are written one by one in a window.
	maxKinds = 20
	// maxActors bounds of how many actors that is known at a time.
	maxActors = 4096
)

// LeftOut is the action of the entry that counts, for one actor, the refusals that were not written one by one.
const LeftOut = "refusals.left_out"

// spent is how many kinds of refusals of an actor were written since a moment of this process's monotonic clock.
type spent struct {
	since time.Time
	kinds int
}

// RefuseBounded is Refuse for those who are refused whatever they name: they can make as many kinds of refusals as they can spell. Of each actor the
// first twenty kinds of a window are written one by one, by each process; what is beyond is counted in one entry, LeftOut, whose count says how many
// refusals it stands for. fill adds what costs a look at the database, and is called only for an entry that is written; what makes its kind (action,
// actor, subject) it must leave as it is. Nil adds nothing.
func (l *Log) RefuseBounded(ctx context.Context, e Entry, err error, fill func(ctx context.Context, e *Entry)) error {
	if l == nil || err == nil {
		return err
	}
	entry, ok := e.Refusal(err)
	if !ok {
		return err
	}
	p := entry.proto(ctx)
	switch {
	case l.again(keysOf(entry, p).key):
		return err
	case !l.afford(p.GetActor()):
		entry = Entry{
			Action: LeftOut, Actor: p.GetActor(), Outcome: Refused, SubjectType: "person", SubjectID: p.GetActor(), TenantID: entry.TenantID,
			Reason:  "too many different refusals to write each: the count says how many this one stands for",
			Details: map[string]any{"written_one_by_one": maxKinds, "window": l.window(), "first_left_out": entry.Action},
		}
	case fill != nil:
		fill(ctx, &entry)
	}
	if failed := l.Repeated(ctx, entry); failed != nil {
		l.deps.Logger.WarnContext(ctx, "refusal not audited yet", slog.String("action", entry.Action), obs.Err(failed))
	}
	return err
}

// again counts one more of a kind that is counted already, and answers whether it is.
func (l *Log) again(key string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	c := l.counted[key]
	if c != nil {
		c.n++
	}
	return c != nil
}

// afford reports whether one more kind of an actor's refusals is written by itself.
func (l *Log) afford(actor string) bool {
	window := l.window()
	l.mu.Lock()
	defer l.mu.Unlock()
	s := l.spent[actor]
	if s == nil || time.Since(s.since) >= window {
		if s == nil && len(l.spent) >= maxActors {
			for a, old := range l.spent {
				if time.Since(old.since) >= window {
					delete(l.spent, a)
				}
			}
			if len(l.spent) >= maxActors {
				return false
			}
		}
		s = &spent{since: time.Now()}
		l.spent[actor] = s
	}
	s.kinds++
	return s.kinds <= maxKinds
}
