package diag

import (
	"slices"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/failpoint"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/names"
)

// Record records a diagnostic and returns the entry once it is on disk. Call it before the retry that nextRetry
// announces.
func (l *Log) Record(code commonv1.DiagnosticCode, detail string, nextRetry time.Duration) (Entry, error) {
	e, err := l.record(code, detail, nextRetry)
	l.notify()
	if l.mirror != nil {
		l.mirror(e)
	}
	if err != nil {
		return e, err
	}
	return e, failpoint.Hit("agent.diag.after_fsync")
}

func (l *Log) record(code commonv1.DiagnosticCode, detail string, nextRetry time.Duration) (Entry, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := l.now()
	e := Entry{
		Code: names.Of(code), Detail: Sanitise(detail), FirstSeen: now, LastSeen: now, Count: 1, NextRetry: nextRetry,
	}
	e.DedupeKeyHash = KeyHash(e.Code, e.Detail)
	if attempt(code) && !l.connected {
		if l.outage == "" {
			l.outage = ids.New()
		}
		e.RetryCorrelationID = l.outage
	} else if code == alive {
		e.RetryCorrelationID = l.outage
	}
	next := slices.Clone(l.entries)
	if i := earlier(next, &e); i >= 0 {
		e.FirstSeen, e.Count, e.Reported = next[i].FirstSeen, next[i].Count+1, next[i].Reported
		next = slices.Delete(next, i, i+1)
	}
	l.entries = bound(append(next, e), now)
	return e, l.write(l.entries)
}

// earlier returns the index of the entry that e repeats, and -1 if it repeats none. Failures repeat the last one, or
// one of the same outage where only failures of that outage came after it, and the sign of life its own entry: the one
// does not come between the others.
func earlier(entries []Entry, e *Entry) int {
	for i := range slices.Backward(entries) {
		old := &entries[i]
		sign := old.Code == names.Of(alive)
		switch {
		case old.DedupeKeyHash == e.DedupeKeyHash && old.EndedAt.IsZero() &&
			(sign || old.RetryCorrelationID == e.RetryCorrelationID):
			return i
		case e.Code == names.Of(alive), sign, e.RetryCorrelationID != "" && old.RetryCorrelationID == e.RetryCorrelationID:
			continue
		}
		return -1
	}
	return -1
}

// Alive records that the process lives. While a session is admitted it records nothing.
func (l *Log) Alive(detail string) error {
	l.mu.Lock()
	connected := l.connected
	l.mu.Unlock()
	if connected {
		return nil
	}
	_, err := l.Record(alive, detail, 0)
	return err
}

// End marks the newest record of a code as over and returns once that is on disk. It reports whether there was one that
// was not over.
func (l *Log) End(code commonv1.DiagnosticCode) (bool, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	spelled, now := names.Of(code), l.now()
	for i, e := range slices.Backward(l.entries) {
		if e.Code != spelled {
			continue
		}
		if !e.EndedAt.IsZero() {
			return false, nil
		}
		l.entries = slices.Clone(l.entries)
		l.entries[i].EndedAt, l.entries[i].LastSeen, l.entries[i].Reported = now, now, 0
		l.notify()
		return true, l.write(l.entries)
	}
	return false, nil
}

// outageOf returns the correlation id of the attempts that had not succeeded when the record was written.
func outageOf(entries []Entry) string {
	for _, e := range slices.Backward(entries) {
		if e.RetryCorrelationID != "" && e.Code != names.Of(alive) {
			if e.EndedAt.IsZero() {
				return e.RetryCorrelationID
			}
			return ""
		}
	}
	return ""
}

// Correlation returns the correlation id of the attempts that fail now; empty if none has failed since a session was
// admitted.
func (l *Log) Correlation() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.outage
}

// Admitted notes that a session was admitted, whose Hello told of the given entries: the attempts that failed are over.
// It writes nothing if there were neither.
func (l *Log) Admitted(reported []Entry) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.connected = true
	l.notify() // what Hello did not have is told now
	next, changed := l.reportedLocked(reported)
	if l.outage != "" {
		now := l.now()
		for i := range next {
			if e := &next[i]; e.RetryCorrelationID == l.outage && e.EndedAt.IsZero() && e.Code != names.Of(alive) {
				e.EndedAt, changed = now, true
			}
		}
		l.outage = ""
	}
	if !changed {
		return nil
	}
	l.entries = next
	return l.write(next)
}

// Lost notes that no session is admitted any more.
func (l *Log) Lost() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.connected = false
}

// Unreported returns the entries of which the control plane was not told, or not at their present count, oldest first
// and at most MaxInHello of the newest. The sign of life is not told: a session is one.
func (l *Log) Unreported() []Entry {
	return l.unreported(func(e *Entry) bool { return e.Count > e.Reported })
}

// News returns the entries to report while a session stands: of those in Unreported, the ones that are new and those
// whose count has doubled since it was told.
func (l *Log) News() []Entry {
	return l.unreported(func(e *Entry) bool { return e.Reported == 0 || e.Count >= 2*e.Reported })
}

func (l *Log) unreported(news func(*Entry) bool) []Entry {
	l.mu.Lock()
	defer l.mu.Unlock()
	var out []Entry
	for i := range l.entries {
		if e := &l.entries[i]; e.Code != names.Of(alive) && news(e) {
			out = append(out, *e)
		}
	}
	return out[max(len(out)-MaxInHello, 0):]
}

// NoteReported notes that the control plane was told of the given entries.
func (l *Log) NoteReported(reported []Entry) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	next, changed := l.reportedLocked(reported)
	if !changed {
		return nil
	}
	l.entries = next
	return l.write(next)
}

func (l *Log) reportedLocked(reported []Entry) ([]Entry, bool) {
	next, changed := slices.Clone(l.entries), false
	for i := range reported {
		for j := range next {
			if next[j].same(reported[i]) && next[j].EndedAt.Equal(reported[i].EndedAt) && next[j].Reported < reported[i].Count {
				next[j].Reported, changed = reported[i].Count, true
			}
		}
	}
	return next, changed
}

// Changed returns a channel that gets a token after entries were recorded or ended.
func (l *Log) Changed() <-chan struct{} { return l.changed }

func (l *Log) notify() {
	select {
	case l.changed <- struct{}{}:
	default:
	}
}
