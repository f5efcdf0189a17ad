package names

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"regexp"
	"strconv"
	"time"

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

// UnmarshalInto is Unmarshal into a message of the caller; it resets the message unless it returns an error.
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
		return bridgeDuration(tree)
	case d.FullName() == timestampType:
		return tree, checkTime(tree)
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
	switch v := value.(type) {
	case json.Number:
		return v, checkNumber(v, f)
	case string:
		if f.Enum() != nil {
			return parse(f.Enum(), v)
		}
		if _, err := base64.StdEncoding.DecodeString(v); err != nil && f.Kind() == protoreflect.BytesKind {
			return nil, errors.New("want base64")
		}
	}
	return value, nil
}

// checkNumber returns an error if a field of that kind cannot have the number: protojson's own error names no path.
func checkNumber(n json.Number, f protoreflect.FieldDescriptor) error {
	var err error
	switch f.Kind() {
	case protoreflect.Int32Kind, protoreflect.Sint32Kind, protoreflect.Sfixed32Kind:
		_, err = strconv.ParseInt(n.String(), 10, 32)
	case protoreflect.Int64Kind, protoreflect.Sint64Kind, protoreflect.Sfixed64Kind:
		_, err = strconv.ParseInt(n.String(), 10, 64)
	case protoreflect.Uint32Kind, protoreflect.Fixed32Kind:
		_, err = strconv.ParseUint(n.String(), 10, 32)
	case protoreflect.Uint64Kind, protoreflect.Fixed64Kind:
		_, err = strconv.ParseUint(n.String(), 10, 64)
	case protoreflect.FloatKind:
		_, err = strconv.ParseFloat(n.String(), 32)
	default:
		_, err = strconv.ParseFloat(n.String(), 64)
	}
	if err != nil {
		return fmt.Errorf("%s is not a number of this field's range", n)
	}
	return nil
}

// bridgeDuration returns a number of seconds as the text of a duration, rounded to nanoseconds.
func bridgeDuration(tree any) (any, error) {
	n, ok := tree.(json.Number)
	if !ok {
		return nil, fmt.Errorf("want a number of seconds, got %s", kindOf(tree))
	}
	x, err := n.Float64()
	if err != nil || math.Abs(x) > 315_576_000_000 {
		return nil, fmt.Errorf("%s is not a number of this field's range", n)
	}
	if _, err := n.Int64(); err == nil {
		return n.String() + "s", nil
	}
	return strconv.FormatFloat(x, 'f', 9, 64) + "s", nil
}

func checkTime(tree any) error {
	s, ok := tree.(string)
	if !ok {
		return fmt.Errorf("want a time in RFC 3339, got %s", kindOf(tree))
	}
	if _, err := time.Parse(time.RFC3339Nano, s); err != nil {
		return fmt.Errorf("%q is not a time in RFC 3339", s)
	}
	return nil
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
