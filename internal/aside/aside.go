// Package aside lets a reader of many rows continue when one of them has a value that this build does not know: a state
// that a newer build wrote during a rolling update, or a row that an operator wrote by hand.
//
// Only that row is set aside. It is reported once, in the log of the process and by the counter rows_set_aside_total,
// and every other row is served. The reader decides what happens to the row; no reader may act on it as if it had
// another value.
//
// Guarantees: an error that is not about a value of an enum is never swallowed; a row that is read again and again is
// reported once while the value stays.
package aside

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/gpuaas/mesh/internal/names"
)

// mostKnown bounds how many occasions are remembered as reported. Beyond it all of them are forgotten, and so reported
// once more.
const mostKnown = 4096

// occasion is one row with one value, as one reader met it.
type occasion struct{ reader, id, enum, value string }

var (
	logger   atomic.Pointer[slog.Logger]
	mu       sync.Mutex
	reported = map[occasion]bool{}
	counted  = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "rows_set_aside_total",
		Help: "Rows and messages with a value that this build does not know, which were set aside alone, by the reader " +
			"that met them; each is counted once.",
	}, []string{"reader"})
)

// Collector returns the counter of the process.
func Collector() prometheus.Collector { return counted }

// Log sets the logger to which the process reports.
func Log(l *slog.Logger) { logger.Store(l) }

// Note reports that a reader sets a row aside and returns true, if err is about a value that this build does not know.
// For any other error it returns false, and the caller handles the error.
func Note(ctx context.Context, reader, id string, err error) bool {
	unknown, first := count(reader, id, err)
	if l := logger.Load(); first && l != nil {
		l.ErrorContext(ctx, text, attributes(reader, id, unknown)...)
	}
	return unknown != nil
}

const text = "a row has a value that this build does not know: it is set aside, the others are served"

func attributes(reader, id string, unknown *names.UnknownError) []any {
	return []any{
		slog.String("reader", reader), slog.String("row", id), slog.String("enum", unknown.Enum),
		slog.String("value", unknown.Value),
	}
}

// count returns the unknown value that err is about, nil if it is about none, and whether this occasion is the first
// one, which it counts.
func count(reader, id string, err error) (*names.UnknownError, bool) {
	var unknown *names.UnknownError
	if !errors.As(err, &unknown) {
		return nil, false
	}
	at := occasion{reader, id, unknown.Enum, unknown.Value}
	mu.Lock()
	defer mu.Unlock()
	if reported[at] {
		return unknown, false
	}
	if len(reported) >= mostKnown {
		clear(reported)
	}
	reported[at] = true
	counted.WithLabelValues(reader).Inc()
	return unknown, true
}

// Value returns the value of a spelling of an enum for a message that shows a row, and unspecified for an empty one. A
// spelling that this build does not know is unspecified too, and reported as by Note: the row is shown without it.
func Value[E protoreflect.Enum](reader, id, spelling string) E {
	if spelling == "" {
		var none E
		return none
	}
	value, err := names.Parse[E](spelling)
	if unknown, first := count(reader, id, err); first {
		if l := logger.Load(); l != nil {
			l.Error(text, attributes(reader, id, unknown)...)
		}
	}
	return value
}

// Rows converts a list and sets aside each row with a value that this build does not know. At any other error it stops
// and returns the error.
func Rows[From, To any](ctx context.Context, reader string, list []From, id func(From) string,
	convert func(From) (To, error),
) ([]To, error) {
	out := make([]To, 0, len(list))
	for _, from := range list {
		to, err := convert(from)
		switch {
		case err == nil:
			out = append(out, to)
		case !Note(ctx, reader, id(from), err):
			return nil, err
		}
	}
	return out, nil
}
