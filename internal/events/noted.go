package events

import (
	"context"
	"sync/atomic"
)

type notedKey struct{}

// Noting returns a context in which Append and AppendSeen note that they appended, and a function that reports whether
// they did: with it a loop that mostly changes nothing wakes the sequencer only if there are events to number. Appends
// in a transaction that was rolled back are noted as well.
func Noting(ctx context.Context) (context.Context, func() bool) {
	var noted atomic.Bool
	return context.WithValue(ctx, notedKey{}, &noted), noted.Load
}

func note(ctx context.Context) {
	if noted, ok := ctx.Value(notedKey{}).(*atomic.Bool); ok {
		noted.Store(true)
	}
}
