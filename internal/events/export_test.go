package events

import (
	"context"
	"time"
)

// Listen makes Listening of a signal true, as a connection does, until the returned function is called.
func Listen(s *Signal) func() { return s.listen() }

// TypeOfKind is the table of messages by the kind of their events.
var TypeOfKind = typeOfKind

// Stored returns the body of an event as Append stores it, and the name of its message.
func Stored(e Event) ([]byte, string, error) {
	c, err := e.content()
	if err != nil {
		return nil, "", err
	}
	return c.body, *c.bodyType, nil
}

// Paced counts the rounds of a sequencer until ctx ends.
func Paced(ctx context.Context, wake *Signal) int {
	cfg := SequencerConfig{}.withDefaults()
	for n := 1; ; n++ {
		woken, urged := wake.C(), wake.urgent()
		if !cfg.rest(ctx, time.Now(), cfg.Poll, woken, urged) {
			return n
		}
	}
}
