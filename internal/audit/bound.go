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
	// maxActors bounds the number of actors for which a process keeps this count at a time.
	maxActors = 4096
)

// LeftOut is the action of the entry that counts, for one actor, the refusals that were not written one by one.
const LeftOut = "refusals.left_out"

// spent is how many kinds of refusals of an actor were written since a moment of this process's monotonic clock.
type spent struct {
	since time.Time
	kinds int
}

// RefuseBounded is Refuse for actors whose every request is refused, whatever it names: each name that they make up is
// another kind of refusal. Of each actor the first twenty kinds of a window are written one by one, by each process;
// those beyond are counted in one entry, LeftOut, whose count is the number of refusals that it stands for. fill adds
// details that cost a query, and is called only for an entry that is written; it must not change what makes the entry's
// kind (action, actor, subject). A nil fill adds nothing.
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
			Action: LeftOut, Actor: p.GetActor(), Outcome: Refused, SubjectType: "person", SubjectID: p.GetActor(),
			TenantID: entry.TenantID,
			Reason:   "too many different refusals to write each: the count says how many this one stands for",
			Details:  map[string]any{"written_one_by_one": maxKinds, "window": l.window(), "first_left_out": entry.Action},
		}
	case fill != nil:
		fill(ctx, &entry)
	}
	if failed := l.Repeated(ctx, entry); failed != nil {
		l.deps.Logger.WarnContext(ctx, "refusal not audited yet", slog.String("action", entry.Action), obs.Err(failed))
	}
	return err
}

// again counts one more refusal of a kind that is counted already, and reports whether the kind is.
func (l *Log) again(key string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	c := l.counted[key]
	if c != nil {
		c.n++
	}
	return c != nil
}

// afford reports whether one more kind of an actor's refusals may have an entry of its own.
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
