package events

import (
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	"github.com/gpuaas/mesh/internal/events/slim"
)

// content is an event's message as it is stored: as JSON, or as bytes with the name of their type. Nil fields are NULL.
type content struct {
	json     *string
	body     []byte
	bodyType *string
}

// content encodes the message of an event.
func (e Event) content() (content, error) {
	switch {
	case e.JSON && e.Payload == nil:
		empty := "{}"
		return content{json: &empty}, nil
	case e.JSON:
		raw, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(e.Payload)
		if err != nil {
			return content{}, fmt.Errorf("encode payload: %w", err)
		}
		text := string(raw)
		return content{json: &text}, nil
	case e.Payload == nil:
		return content{body: []byte{}, bodyType: new(string)}, nil
	}
	raw, err := proto.MarshalOptions{}.MarshalAppend([]byte{}, e.Payload) // never nil: NULL means JSON
	if err != nil {
		return content{}, fmt.Errorf("encode payload: %w", err)
	}
	d := e.Payload.ProtoReflect().Descriptor()
	if raw, err = slim.Body(raw, d, e.texts()); err != nil {
		return content{}, fmt.Errorf("encode payload: %w", err)
	}
	name := string(d.FullName())
	if typeOfKind[e.Kind] == name {
		name = ""
	}
	return content{body: raw, bodyType: &name}, nil
}

// Record is a numbered event as it is read from the log.
type Record struct {
	Pos int64 `db:"-"`
	// ID is empty for an event that no caller waits for.
	ID               string `db:"id" expr:"COALESCE(@.id::text, '')"`
	Source           string `db:"source"`
	Kind             string `db:"kind"`
	AggregateType    string `db:"aggregate_type"`
	AggregateID      string `db:"aggregate_id"`
	AggregateVersion int64  `db:"aggregate_version"`
	// Stored is the payload of an event that is stored as JSON: one of an earlier build, or an entry of the audit log. It
	// is nil otherwise.
	Stored json.RawMessage `db:"payload"`
	// Body is the message of any other event, and BodyType its full name, or empty where its kind implies it; an event
	// without a message has neither.
	Body      []byte    `db:"body"`
	BodyType  string    `db:"body_type" expr:"COALESCE(@.body_type, '')"`
	CreatedAt time.Time `db:"created_at"`
	Correlation
}

// Decode reads the event's message into m. If the event is stored as bytes, fields that m does not know are kept in m
// as unknown fields: the writer may be newer.
func (r Record) Decode(m proto.Message) error {
	err := r.decode(m)
	if err != nil {
		return fmt.Errorf("decode event %s at %d: %w", r.Kind, r.Pos, err)
	}
	return nil
}

func (r Record) decode(m proto.Message) error {
	if r.Stored != nil {
		return protojson.UnmarshalOptions{DiscardUnknown: true}.Unmarshal(r.Stored, m)
	}
	if name, stored := m.ProtoReflect().Descriptor().FullName(), r.messageType(); stored != "" && string(name) != stored {
		return fmt.Errorf("the event carries a %s, not a %s", stored, name)
	}
	return slim.Unmarshal(r.Body, r.texts(), m)
}

// Payload returns the event's message as JSON, with the field names of its definition. For a message of a type that
// this build does not know it returns an object with its "type" and its bytes in "hex".
func (r Record) Payload() (json.RawMessage, error) {
	name := r.messageType()
	switch {
	case r.Stored != nil:
		return r.Stored, nil
	case name == "":
		return json.RawMessage("{}"), nil
	}
	found, err := protoregistry.GlobalTypes.FindMessageByName(protoreflect.FullName(name))
	if errors.Is(err, protoregistry.NotFound) {
		return json.Marshal(map[string]string{"type": name, "hex": hex.EncodeToString(r.Body)})
	}
	if err != nil {
		return nil, fmt.Errorf("find type of event %s at %d: %w", r.Kind, r.Pos, err)
	}
	m := found.New().Interface()
	if err := r.Decode(m); err != nil {
		return nil, err
	}
	raw, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(m)
	if err != nil {
		return nil, fmt.Errorf("spell event %s at %d: %w", r.Kind, r.Pos, err)
	}
	return raw, nil
}
