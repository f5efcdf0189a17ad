package names

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"regexp"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// Unmarshal reads what MarshalJSON prints into a new message of type M. null leaves a field unset. An unknown field, a
// value of another kind, a number out of range and anything after the object are errors that name the field.
func Unmarshal[M proto.Message](data []byte) (M, error) {
	var zero M
	m, ok := zero.ProtoReflect().Type().New().Interface().(M)
	if !ok {
		return zero, fmt.Errorf("message %s is not generated as %T", zero.ProtoReflect().Descriptor().FullName(), zero)
	}
	if err := UnmarshalInto(data, m); err != nil {
		return zero, err
	}
	return m, nil
}

// UnmarshalInto is Unmarshal into a message of the caller; it resets the message first.
func UnmarshalInto(data []byte, m proto.Message) error {
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.UseNumber()
	var tree any
	if err := dec.Decode(&tree); err != nil {
		return fmt.Errorf("read JSON: %w", err)
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return errors.New("read JSON: more than one value")
	}
	bridged, err := bridgeMessage(tree, m.ProtoReflect().Descriptor())
	if err != nil {
		return err
	}
	raw, err := json.Marshal(bridged)
	if err != nil {
		return fmt.Errorf("read JSON: %w", err)
	}
	if err := protojson.Unmarshal(raw, m); err != nil {
		return errors.New(place.ReplaceAllString(err.Error(), ""))
	}
	return nil
}

// place matches where protojson says that an error is. It is a place in the bridged text, which the caller never saw.
var place = regexp.MustCompile(`^proto:[\s\x{a0}]*(syntax error )?(\(line \d+:\d+\): )?`)

// bridgeMessage returns the tree of a message as MarshalJSON prints it in the form that protojson reads: the two differ
// in the spelling of enum values and of durations. It refuses what protojson would accept and MarshalJSON never prints:
// names of fields in camelCase, enum values by number, and numbers as text.
func bridgeMessage(tree any, d protoreflect.MessageDescriptor) (any, error) {
	switch {
	case d.FullName() == durationType:
		n, ok := tree.(json.Number)
		if !ok {
			return nil, fmt.Errorf("want a number of seconds, got %s", kindOf(tree))
		}
		return n.String() + "s", nil
	case d.ParentFile().Package() == "google.protobuf":
		return tree, nil
	}
	object, ok := tree.(map[string]any)
	if !ok {
		return nil, fmt.Errorf("want an object, got %s", kindOf(tree))
	}
	for key, value := range object {
		f := d.Fields().ByName(protoreflect.Name(key))
		if f == nil {
			return nil, fmt.Errorf("%s: unknown field of %s", key, d.Name())
		}
		if value == nil {
			continue
		}
		bridged, err := bridgeField(value, f)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", key, err)
		}
		object[key] = bridged
	}
	return object, nil
}

func bridgeField(value any, f protoreflect.FieldDescriptor) (any, error) {
	switch {
	case f.IsList():
		items, ok := value.([]any)
		if !ok {
			return nil, fmt.Errorf("want a list, got %s", kindOf(value))
		}
		for i, item := range items {
			bridged, err := bridgeValue(item, f)
			if err != nil {
				return nil, fmt.Errorf("%d: %w", i, err)
			}
			items[i] = bridged
		}
		return items, nil
	case f.IsMap():
		object, ok := value.(map[string]any)
		if !ok {
			return nil, fmt.Errorf("want an object, got %s", kindOf(value))
		}
		for key, item := range object {
			bridged, err := bridgeValue(item, f.MapValue())
			if err != nil {
				return nil, fmt.Errorf("%s: %w", key, err)
			}
			object[key] = bridged
		}
		return object, nil
	default:
		return bridgeValue(value, f)
	}
}

func bridgeValue(value any, f protoreflect.FieldDescriptor) (any, error) {
	want := "a number"
	switch f.Kind() {
	case protoreflect.MessageKind, protoreflect.GroupKind:
		return bridgeMessage(value, f.Message())
	case protoreflect.BoolKind:
		want = "true or false"
	case protoreflect.StringKind, protoreflect.BytesKind, protoreflect.EnumKind:
		want = "text"
	}
	if got := kindOf(value); got != want {
		return nil, fmt.Errorf("want %s, got %s", want, got)
	}
	if f.Enum() == nil {
		return value, nil
	}
	n, err := parse(f.Enum(), value.(string)) // it is text
	return n, err
}

func kindOf(tree any) string {
	switch tree.(type) {
	case nil:
		return "null"
	case bool:
		return "true or false"
	case json.Number:
		return "a number"
	case string:
		return "text"
	case []any:
		return "a list"
	default:
		return "an object"
	}
}
