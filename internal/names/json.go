package names

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

const (
	timestampType protoreflect.FullName = "google.protobuf.Timestamp"
	durationType  protoreflect.FullName = "google.protobuf.Duration"
	structType    protoreflect.FullName = "google.protobuf.Struct"
	valueType     protoreflect.FullName = "google.protobuf.Value"
	listType      protoreflect.FullName = "google.protobuf.ListValue"
)

// MarshalJSON returns a message as one line of JSON: snake_case field names in the order of the descriptor, times in
// RFC 3339, durations as a number of seconds, enum values as Of spells them, 64-bit integers as numbers, bytes in
// base64, and every field that is not set: a scalar as its zero, a list as [], a map as {}, a message and an unset
// optional or oneof member as null. It fails only on text that is not UTF-8 and on times outside the years 1 to 9999.
func MarshalJSON(m proto.Message) ([]byte, error) {
	if m == nil {
		return []byte("null"), nil
	}
	return appendMessage(nil, m.ProtoReflect())
}

func appendMessage(b []byte, m protoreflect.Message) ([]byte, error) {
	if !m.IsValid() {
		return append(b, "null"...), nil
	}
	d := m.Descriptor()
	switch d.FullName() {
	case timestampType:
		return appendTimestamp(b, m)
	case durationType:
		return appendDuration(b, m), nil
	case structType, valueType, listType:
		raw, err := protojson.Marshal(m.Interface())
		if err != nil {
			return nil, fmt.Errorf("marshal %s: %w", d.FullName(), err)
		}
		var compact any
		if err := json.Unmarshal(raw, &compact); err != nil {
			return nil, fmt.Errorf("marshal %s: %w", d.FullName(), err)
		}
		raw, err = json.Marshal(compact) // protojson varies its spaces on purpose
		return append(b, raw...), err
	}
	if d.ParentFile().Path() == "google/protobuf/wrappers.proto" {
		f := d.Fields().Get(0)
		return appendScalar(b, f, m.Get(f))
	}
	b = append(b, '{')
	fields := d.Fields()
	for i := range fields.Len() {
		f := fields.Get(i)
		if i > 0 {
			b = append(b, ',')
		}
		b = strconv.AppendQuote(b, string(f.Name()))
		b = append(b, ':')
		var err error
		if b, err = appendField(b, m, f); err != nil {
			return nil, fmt.Errorf("%s: %w", f.Name(), err)
		}
	}
	return append(b, '}'), nil
}

func appendField(b []byte, m protoreflect.Message, f protoreflect.FieldDescriptor) ([]byte, error) {
	switch {
	case f.IsList():
		return appendList(b, f, m.Get(f).List())
	case f.IsMap():
		return appendMap(b, f, m.Get(f).Map())
	case f.HasPresence() && !m.Has(f):
		return append(b, "null"...), nil
	default:
		return appendValue(b, f, m.Get(f))
	}
}

func appendList(b []byte, f protoreflect.FieldDescriptor, list protoreflect.List) ([]byte, error) {
	b = append(b, '[')
	for i := range list.Len() {
		if i > 0 {
			b = append(b, ',')
		}
		var err error
		if b, err = appendValue(b, f, list.Get(i)); err != nil {
			return nil, err
		}
	}
	return append(b, ']'), nil
}

func appendMap(b []byte, f protoreflect.FieldDescriptor, m protoreflect.Map) ([]byte, error) {
	keys := make([]string, 0, m.Len())
	values := make(map[string]protoreflect.Value, m.Len())
	m.Range(func(k protoreflect.MapKey, v protoreflect.Value) bool {
		keys = append(keys, k.String())
		values[k.String()] = v
		return true
	})
	slices.Sort(keys)
	b = append(b, '{')
	for i, k := range keys {
		if i > 0 {
			b = append(b, ',')
		}
		var err error
		if b, err = appendString(b, k); err != nil {
			return nil, err
		}
		b = append(b, ':')
		if b, err = appendValue(b, f.MapValue(), values[k]); err != nil {
			return nil, err
		}
	}
	return append(b, '}'), nil
}

func appendValue(b []byte, f protoreflect.FieldDescriptor, v protoreflect.Value) ([]byte, error) {
	if f.Message() != nil {
		return appendMessage(b, v.Message())
	}
	return appendScalar(b, f, v)
}

func appendScalar(b []byte, f protoreflect.FieldDescriptor, v protoreflect.Value) ([]byte, error) {
	switch f.Kind() {
	case protoreflect.BoolKind:
		return strconv.AppendBool(b, v.Bool()), nil
	case protoreflect.EnumKind:
		return appendString(b, spell(f.Enum(), v.Enum()))
	case protoreflect.Int32Kind, protoreflect.Sint32Kind, protoreflect.Sfixed32Kind,
		protoreflect.Int64Kind, protoreflect.Sint64Kind, protoreflect.Sfixed64Kind:
		return strconv.AppendInt(b, v.Int(), 10), nil
	case protoreflect.Uint32Kind, protoreflect.Fixed32Kind, protoreflect.Uint64Kind, protoreflect.Fixed64Kind:
		return strconv.AppendUint(b, v.Uint(), 10), nil
	case protoreflect.FloatKind:
		return appendFloat(b, v.Float(), 32), nil
	case protoreflect.DoubleKind:
		return appendFloat(b, v.Float(), 64), nil
	case protoreflect.StringKind:
		return appendString(b, v.String())
	case protoreflect.BytesKind:
		return appendString(b, base64.StdEncoding.EncodeToString(v.Bytes()))
	default:
		return nil, fmt.Errorf("kind %s has no spelling", f.Kind())
	}
}

// appendFloat prints values that JSON cannot express as a number (infinities, not a number) as null.
func appendFloat(b []byte, f float64, bits int) []byte {
	if math.IsNaN(f) || math.IsInf(f, 0) {
		return append(b, "null"...)
	}
	if f == math.Trunc(f) && math.Abs(f) < 1e15 {
		return strconv.AppendFloat(b, f, 'f', -1, bits)
	}
	return strconv.AppendFloat(b, f, 'g', -1, bits)
}

func appendString(b []byte, s string) ([]byte, error) {
	if !utf8.ValidString(s) {
		return nil, fmt.Errorf("text is not UTF-8")
	}
	raw, err := json.Marshal(s)
	return append(b, raw...), err
}

func appendTimestamp(b []byte, m protoreflect.Message) ([]byte, error) {
	seconds, nanos := secondsAndNanos(m)
	t := time.Unix(seconds, nanos).UTC()
	if t.Year() < 1 || t.Year() > 9999 || nanos < 0 || nanos > 999_999_999 {
		return nil, fmt.Errorf("timestamp is outside the years 1 to 9999")
	}
	return strconv.AppendQuote(b, t.Format(time.RFC3339Nano)), nil
}

func appendDuration(b []byte, m protoreflect.Message) []byte {
	seconds, nanos := secondsAndNanos(m)
	if nanos == 0 {
		return strconv.AppendInt(b, seconds, 10)
	}
	sign := ""
	if seconds < 0 || nanos < 0 {
		sign, seconds, nanos = "-", -seconds, -nanos
	}
	return append(b, strings.TrimRight(fmt.Sprintf("%s%d.%09d", sign, seconds, nanos), "0")...)
}

func secondsAndNanos(m protoreflect.Message) (int64, int64) {
	fields := m.Descriptor().Fields()
	return m.Get(fields.ByName("seconds")).Int(), m.Get(fields.ByName("nanos")).Int()
}
