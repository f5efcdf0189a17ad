package names

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// Unmarshal reads what MarshalJSON prints into a new message of type M. null leaves a field unset. An unknown field, a
// value of another kind, a number out of range and anything after the object are errors that name the path.
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
	proto.Reset(m)
	return readMessage(tree, m.ProtoReflect())
}

func readMessage(tree any, m protoreflect.Message) error {
	d := m.Descriptor()
	switch d.FullName() {
	case timestampType:
		return readTimestamp(tree, m)
	case durationType:
		return readDuration(tree, m)
	case structType, valueType, listType:
		raw, err := json.Marshal(tree)
		if err != nil {
			return err
		}
		return protojson.Unmarshal(raw, m.Interface())
	}
	if d.ParentFile().Path() == "google/protobuf/wrappers.proto" {
		f := d.Fields().Get(0)
		v, err := readScalar(tree, f)
		if err == nil {
			m.Set(f, v)
		}
		return err
	}
	object, ok := tree.(map[string]any)
	if !ok {
		return fmt.Errorf("want an object, got %s", kindOf(tree))
	}
	for key, value := range object {
		f := d.Fields().ByName(protoreflect.Name(key))
		if f == nil {
			return fmt.Errorf("%s: unknown field of %s", key, d.Name())
		}
		if value == nil {
			continue
		}
		if err := readField(value, m, f); err != nil {
			return fmt.Errorf("%s: %w", key, err)
		}
	}
	return nil
}

func readField(value any, m protoreflect.Message, f protoreflect.FieldDescriptor) error {
	switch {
	case f.IsList():
		items, ok := value.([]any)
		if !ok {
			return fmt.Errorf("want a list, got %s", kindOf(value))
		}
		list := m.Mutable(f).List()
		for i, item := range items {
			v, err := readElement(item, f, list.NewElement)
			if err != nil {
				return fmt.Errorf("%d: %w", i, err)
			}
			list.Append(v)
		}
		return nil
	case f.IsMap():
		object, ok := value.(map[string]any)
		if !ok {
			return fmt.Errorf("want an object, got %s", kindOf(value))
		}
		out := m.Mutable(f).Map()
		for k, item := range object {
			key, err := readKey(k, f.MapKey())
			if err != nil {
				return fmt.Errorf("%s: %w", k, err)
			}
			v, err := readElement(item, f.MapValue(), out.NewValue)
			if err != nil {
				return fmt.Errorf("%s: %w", k, err)
			}
			out.Set(key, v)
		}
		return nil
	case f.Message() != nil:
		return readMessage(value, m.Mutable(f).Message())
	default:
		v, err := readScalar(value, f)
		if err == nil {
			m.Set(f, v)
		}
		return err
	}
}

func readElement(item any, f protoreflect.FieldDescriptor, fresh func() protoreflect.Value) (protoreflect.Value,
	error,
) {
	if f.Message() == nil {
		return readScalar(item, f)
	}
	v := fresh()
	return v, readMessage(item, v.Message())
}

func readKey(k string, f protoreflect.FieldDescriptor) (protoreflect.MapKey, error) {
	switch f.Kind() {
	case protoreflect.StringKind:
		return protoreflect.ValueOfString(k).MapKey(), nil
	case protoreflect.BoolKind:
		b, err := strconv.ParseBool(k)
		return protoreflect.ValueOfBool(b).MapKey(), err
	default:
		v, err := readScalar(json.Number(k), f)
		if err != nil {
			return protoreflect.MapKey{}, err
		}
		return v.MapKey(), nil
	}
}

func readScalar(tree any, f protoreflect.FieldDescriptor) (protoreflect.Value, error) {
	var none protoreflect.Value
	switch f.Kind() {
	case protoreflect.BoolKind:
		if b, ok := tree.(bool); ok {
			return protoreflect.ValueOfBool(b), nil
		}
		return none, fmt.Errorf("want true or false, got %s", kindOf(tree))
	case protoreflect.StringKind, protoreflect.BytesKind, protoreflect.EnumKind:
		s, ok := tree.(string)
		if !ok {
			return none, fmt.Errorf("want text, got %s", kindOf(tree))
		}
		return readText(s, f)
	}
	n, ok := tree.(json.Number)
	if !ok {
		return none, fmt.Errorf("want a number, got %s", kindOf(tree))
	}
	switch f.Kind() {
	case protoreflect.Int32Kind, protoreflect.Sint32Kind, protoreflect.Sfixed32Kind:
		i, err := strconv.ParseInt(n.String(), 10, 32)
		return protoreflect.ValueOfInt32(int32(i)), numberError(n, err)
	case protoreflect.Int64Kind, protoreflect.Sint64Kind, protoreflect.Sfixed64Kind:
		i, err := strconv.ParseInt(n.String(), 10, 64)
		return protoreflect.ValueOfInt64(i), numberError(n, err)
	case protoreflect.Uint32Kind, protoreflect.Fixed32Kind:
		i, err := strconv.ParseUint(n.String(), 10, 32)
		return protoreflect.ValueOfUint32(uint32(i)), numberError(n, err)
	case protoreflect.Uint64Kind, protoreflect.Fixed64Kind:
		i, err := strconv.ParseUint(n.String(), 10, 64)
		return protoreflect.ValueOfUint64(i), numberError(n, err)
	case protoreflect.FloatKind:
		x, err := strconv.ParseFloat(n.String(), 32)
		return protoreflect.ValueOfFloat32(float32(x)), numberError(n, err)
	case protoreflect.DoubleKind:
		x, err := strconv.ParseFloat(n.String(), 64)
		return protoreflect.ValueOfFloat64(x), numberError(n, err)
	default:
		return none, fmt.Errorf("kind %s has no spelling", f.Kind())
	}
}

func readText(s string, f protoreflect.FieldDescriptor) (protoreflect.Value, error) {
	switch f.Kind() {
	case protoreflect.EnumKind:
		n, err := parse(f.Enum(), s)
		return protoreflect.ValueOfEnum(n), err
	case protoreflect.BytesKind:
		raw, err := base64.StdEncoding.DecodeString(s)
		if err != nil {
			return protoreflect.Value{}, errors.New("want base64")
		}
		return protoreflect.ValueOfBytes(raw), nil
	default:
		return protoreflect.ValueOfString(s), nil
	}
}

func numberError(n json.Number, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s is not a number of this field's range", n)
}

func readTimestamp(tree any, m protoreflect.Message) error {
	s, ok := tree.(string)
	if !ok {
		return fmt.Errorf("want a time in RFC 3339, got %s", kindOf(tree))
	}
	t, err := time.Parse(time.RFC3339Nano, s)
	if err != nil {
		return fmt.Errorf("%q is not a time in RFC 3339", s)
	}
	setSecondsAndNanos(m, t.Unix(), int32(t.Nanosecond()))
	return nil
}

func readDuration(tree any, m protoreflect.Message) error {
	n, ok := tree.(json.Number)
	if !ok {
		return fmt.Errorf("want a number of seconds, got %s", kindOf(tree))
	}
	if !strings.ContainsAny(n.String(), ".eE") {
		seconds, err := n.Int64()
		if err != nil {
			return numberError(n, err)
		}
		setSecondsAndNanos(m, seconds, 0)
		return nil
	}
	x, err := n.Float64()
	if err != nil || math.Abs(x) > 315_576_000_000 {
		return fmt.Errorf("%s is not a number of this field's range", n)
	}
	whole := math.Trunc(x)
	nanos := math.Round((x - whole) * 1e9)
	if math.Abs(nanos) >= 1e9 {
		whole, nanos = whole+math.Copysign(1, nanos), 0
	}
	setSecondsAndNanos(m, int64(whole), int32(nanos))
	return nil
}

func setSecondsAndNanos(m protoreflect.Message, seconds int64, nanos int32) {
	fields := m.Descriptor().Fields()
	m.Set(fields.ByName("seconds"), protoreflect.ValueOfInt64(seconds))
	m.Set(fields.ByName("nanos"), protoreflect.ValueOfInt32(nanos))
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
