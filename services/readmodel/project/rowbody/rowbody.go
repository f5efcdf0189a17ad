// Package rowbody encodes the messages of events as the bodies of projected rows, and decodes them.
//
// A body keeps the fields of a message that this build does not know, so that a later build reads them.
package rowbody

import (
	"bytes"
	"encoding/json"
	"fmt"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/secretenv"
)

// wholeField is the field of a row's body with the bytes of a message that has fields which this build does not know,
// so that a later build can return them. No field of a message has this name, because those begin with a letter.
const wholeField = "@whole"

// Content is the body of a row before it is encoded. Encoding is deferred because most rows of a batch are superseded
// by later ones and never written.
type Content struct {
	Message   proto.Message
	Stored    json.RawMessage // of an event that is stored as JSON; it is the body as it is
	ShowNames bool            // of the environment of workloads only the names are shown
}

// Of decodes an event into m, and returns it with the body of a row that holds the whole message.
func Of[M proto.Message](r events.Record, m M) (M, *Content, error) {
	if err := r.Decode(m); err != nil {
		return m, nil, err
	}
	return m, &Content{Message: m, Stored: r.Stored}, nil
}

// Encode returns the body as it is stored.
func (c *Content) Encode() (json.RawMessage, error) {
	body, err := c.Stored, error(nil)
	if body == nil {
		body, err = encode(c.Message)
	}
	if err == nil && c.ShowNames {
		return wrapped(secretenv.ShowNamesIn(body))
	}
	return body, err
}

// encode returns the body of a row for a message.
func encode(m proto.Message) (json.RawMessage, error) {
	body, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(m)
	if err != nil || !hasUnknown(m.ProtoReflect()) {
		return wrapped(body, err)
	}
	fields := map[string]json.RawMessage{}
	if err := json.Unmarshal(body, &fields); err != nil {
		return wrapped(nil, err)
	}
	whole, err := proto.MarshalOptions{Deterministic: true}.Marshal(m) // Verify compares what is made of it
	if err == nil {
		fields[wholeField], err = json.Marshal(whole)
	}
	if err == nil {
		body, err = json.Marshal(fields)
	}
	return wrapped(body, err)
}

func wrapped(body json.RawMessage, err error) (json.RawMessage, error) {
	if err != nil {
		return nil, fmt.Errorf("encode row: %w", err)
	}
	return body, nil
}

// hasUnknown reports whether a message, or one within it, has fields that this build does not know.
func hasUnknown(m protoreflect.Message) bool {
	found := len(m.GetUnknown()) > 0
	m.Range(func(f protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		switch {
		case found:
		case f.IsMap() && f.MapValue().Message() != nil:
			v.Map().Range(func(_ protoreflect.MapKey, v protoreflect.Value) bool {
				found = hasUnknown(v.Message())
				return !found
			})
		case f.IsMap() || f.Message() == nil:
		case f.IsList():
			for i := 0; i < v.List().Len() && !found; i++ {
				found = hasUnknown(v.List().Get(i).Message())
			}
		default:
			found = hasUnknown(v.Message())
		}
		return !found
	})
	return found
}

// Decode decodes the body of a projected row into m.
func Decode(body []byte, m proto.Message) error {
	if len(body) == 0 {
		return nil
	}
	if bytes.Contains(body, []byte(`"`+wholeField+`"`)) {
		var kept struct {
			Whole []byte `json:"@whole"`
		}
		if err := json.Unmarshal(body, &kept); err != nil {
			return fmt.Errorf("decode projected row: %w", err)
		}
		if kept.Whole != nil { // otherwise the text is part of a value
			if err := proto.Unmarshal(kept.Whole, m); err != nil {
				return fmt.Errorf("decode projected row: %w", err)
			}
			return nil
		}
	}
	if err := (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(body, m); err != nil {
		return fmt.Errorf("decode projected row: %w", err)
	}
	return nil
}
