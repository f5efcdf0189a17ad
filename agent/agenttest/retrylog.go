package agenttest

import (
	"context"
	"log/slog"
	"testing"
)

// Catcher is a handler of logs that passes on records of one message, and drops them while none is taken.
type Catcher struct {
	Found   chan slog.Record
	message string
}

// NewCatcher returns a handler for a message.
func NewCatcher(message string) *Catcher {
	return &Catcher{message: message, Found: make(chan slog.Record, 1)}
}

// Enabled implements slog.Handler.
func (*Catcher) Enabled(context.Context, slog.Level) bool { return true }

// Handle implements slog.Handler.
func (c *Catcher) Handle(_ context.Context, r slog.Record) error {
	if r.Message == c.message {
		select {
		case c.Found <- r.Clone():
		default:
		}
	}
	return nil
}

// WithAttrs implements slog.Handler.
func (c *Catcher) WithAttrs([]slog.Attr) slog.Handler { return c }

// WithGroup implements slog.Handler.
func (c *Catcher) WithGroup(string) slog.Handler { return c }

// CheckRetryLine checks that a line in the log of a retry has the record that was made of the failure.
func CheckRetryLine(tb testing.TB, line slog.Record) {
	tb.Helper()
	attrs := map[string]slog.Value{}
	line.Attrs(func(a slog.Attr) bool { attrs[a.Key] = a.Value; return true })
	for _, key := range []string{"correlation_id", "dedupe_key_hash", "first_seen", "last_seen", "count"} {
		value, ok := attrs[key]
		switch {
		case !ok:
			tb.Errorf("%q has no %s", line.Message, key)
		case value.Kind() == slog.KindString && value.String() == "",
			value.Kind() == slog.KindTime && value.Time().IsZero(), value.Kind() == slog.KindInt64 && value.Int64() < 1:
			tb.Errorf("%q has %s %v", line.Message, key, value)
		}
	}
}
