package events

import (
	"context"
	"fmt"
	"time"

	"google.golang.org/protobuf/reflect/protoreflect"
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

// LeftOut returns the fields of a message that slim bodies may leave out, by number, each with the column that replaces
// it.
func LeftOut(d protoreflect.MessageDescriptor) []string {
	var out []string
	add := func(of string, p *slimPlan) {
		for _, f := range p.fields {
			out = append(out, fmt.Sprintf("%s%d=%s", of, f.number, slimFields[f.index][0]))
		}
	}
	p := planOf(d)
	add("", p)
	for _, l := range p.lists {
		add(fmt.Sprintf("%d.", l.number), l.plan)
	}
	return out
}

// Paced counts the rounds of a sequencer until ctx ends.
func Paced(ctx context.Context, wake *Signal) int {
	cfg := sequencerDefaults
	for n := 1; ; n++ {
		woken, urged := wake.C(), wake.urgent()
		if !cfg.rest(ctx, time.Now(), cfg.Poll, woken, urged) {
			return n
		}
	}
}
