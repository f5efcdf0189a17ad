// Package slim makes the bodies of events smaller: a body leaves out the ids that the columns of its event have anyway,
// which are a third of the bytes of a saga's events.
//
// It decides which fields of a message may be left out, by their names, and how a body records it. It knows neither
// events nor the database.
//
// Guarantees: a message is read as it was written, whatever ids it and its event have. A body that was written is read
// alike by every later build, as long as no message of events gains or loses a field with the name of a column.
package slim

import (
	"errors"
	"fmt"
	"slices"
	"sync"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// mark is the first byte of a slim body: a zero byte, with which no message in the wire format of protobuf begins (a
// field's number is at least 1). The second byte has a bit for each column: if it is set, the fields with the column's
// name were equal to the column wherever the message has them, in itself and in the messages of its lists, and were
// left out. Reading restores them.
const mark = 0

// IDs are the columns of an event that may replace fields, in the order of columnFields; an empty one replaces none.
type IDs [8]string

// columnFields are the names of the fields that each column may replace. A run is a workflow.
var columnFields = [8][]protoreflect.Name{
	{"correlation_id"},
	{"tenant_id"},
	{"workspace_id"},
	{"workflow_id", "run_id"},
	{"allocation_id"},
	{"task_id"},
	{"node_id"},
	{"node_instance_id"},
}

// plan lists the places at which a message type has such fields.
type plan struct {
	fields  []field
	lists   []list
	columns byte // the columns that have a field, lists included
}

type field struct {
	number protowire.Number
	column byte // its bit
	index  int  // of the column
	field  protoreflect.FieldDescriptor
}

// list is a list of messages that have such fields themselves.
type list struct {
	number protowire.Number
	field  protoreflect.FieldDescriptor
	plan   *plan
}

var plans sync.Map // *plan by full name of the message type

// planOf returns the plan of a message type. Lists are followed one level deep.
func planOf(d protoreflect.MessageDescriptor) *plan {
	if known, ok := plans.Load(d.FullName()); ok {
		return known.(*plan)
	}
	p := fieldsOf(d)
	for i := range d.Fields().Len() {
		f := d.Fields().Get(i)
		if !f.IsList() || f.Message() == nil {
			continue
		}
		if inner := fieldsOf(f.Message()); len(inner.fields) > 0 {
			p.lists = append(p.lists, list{number: f.Number(), field: f, plan: inner})
			p.columns |= inner.columns
		}
	}
	plans.Store(d.FullName(), p)
	return p
}

// fieldsOf returns the plan of a message type without its lists.
func fieldsOf(d protoreflect.MessageDescriptor) *plan {
	p := &plan{}
	for column, names := range columnFields {
		for _, name := range names {
			f := d.Fields().ByName(name)
			if f == nil || f.IsList() || f.Kind() != protoreflect.StringKind || f.HasPresence() {
				continue
			}
			p.fields = append(p.fields, field{number: f.Number(), column: 1 << column, index: column, field: f})
			p.columns |= 1 << column
		}
	}
	return p
}

// at returns the index of a field in fields, or -1.
func (p *plan) at(number protowire.Number) int {
	return slices.IndexFunc(p.fields, func(f field) bool { return f.number == number })
}

func (p *plan) list(number protowire.Number) *plan {
	for _, l := range p.lists {
		if l.number == number {
			return l.plan
		}
	}
	return nil
}

var errWireFormat = errors.New("not a message in protobuf's wire format")

// Body returns the body of an event whose message is encoded in raw: without the fields that its columns replace, if
// there are any.
func Body(raw []byte, d protoreflect.MessageDescriptor, ids IDs) ([]byte, error) {
	p := planOf(d)
	columns := p.columns
	for column, id := range ids {
		if id == "" {
			columns &^= 1 << column
		}
	}
	if columns == 0 {
		return raw, nil
	}
	if err := p.compare(raw, &ids, &columns); err != nil || columns == 0 {
		return raw, err
	}
	return p.cut(append(make([]byte, 0, len(raw)+2), mark, columns), raw, columns)
}

// compare removes from columns each column from which a field of the message differs. An empty field is not in the
// encoding, and counts as different.
func (p *plan) compare(raw []byte, ids *IDs, columns *byte) error {
	var seen uint16
	err := eachField(raw, func(number protowire.Number, _, value []byte) error {
		if i := p.at(number); i >= 0 {
			seen |= 1 << i
			if string(value) != ids[p.fields[i].index] {
				*columns &^= p.fields[i].column
			}
		} else if list := p.list(number); list != nil {
			return list.compare(value, ids, columns)
		}
		return nil
	})
	for i, f := range p.fields {
		if seen&(1<<i) == 0 {
			*columns &^= f.column
		}
	}
	return err
}

// cut appends the message to out without the fields of the columns.
func (p *plan) cut(out, raw []byte, columns byte) ([]byte, error) {
	err := eachField(raw, func(number protowire.Number, whole, value []byte) error {
		if i := p.at(number); i >= 0 && p.fields[i].column&columns != 0 {
			return nil
		}
		list := p.list(number)
		if list == nil {
			out = append(out, whole...)
			return nil
		}
		inner, err := list.cut(make([]byte, 0, len(value)), value, columns)
		out = protowire.AppendBytes(protowire.AppendTag(out, number, protowire.BytesType), inner)
		return err
	})
	return out, err
}

// eachField calls what for each field of an encoded message: with its number, all of its bytes, and for a field with a
// length the bytes of its value.
func eachField(raw []byte, what func(number protowire.Number, whole, value []byte) error) error {
	for len(raw) > 0 {
		number, kind, tag := protowire.ConsumeTag(raw)
		if tag < 0 {
			return errWireFormat
		}
		length := protowire.ConsumeFieldValue(number, kind, raw[tag:])
		if length < 0 {
			return errWireFormat
		}
		var value []byte
		if kind == protowire.BytesType {
			value, _ = protowire.ConsumeBytes(raw[tag:])
		}
		if err := what(number, raw[:tag+length], value); err != nil {
			return err
		}
		raw = raw[tag+length:]
	}
	return nil
}

// Unmarshal reads the message of a body, slim or not.
func Unmarshal(body []byte, ids IDs, m proto.Message) error {
	if len(body) == 0 || body[0] != mark {
		return proto.Unmarshal(body, m)
	}
	if len(body) < 2 {
		return fmt.Errorf("a slim body of %d bytes: %w", len(body), errWireFormat)
	}
	if err := proto.Unmarshal(body[2:], m); err != nil {
		return err
	}
	planOf(m.ProtoReflect().Descriptor()).fill(m.ProtoReflect(), &ids, body[1])
	return nil
}

// fill sets the fields that the columns replace.
func (p *plan) fill(m protoreflect.Message, ids *IDs, columns byte) {
	for _, f := range p.fields {
		if f.column&columns != 0 {
			m.Set(f.field, protoreflect.ValueOfString(ids[f.index]))
		}
	}
	for _, l := range p.lists {
		if l.plan.columns&columns == 0 {
			continue
		}
		all := m.Get(l.field).List()
		for i := range all.Len() {
			l.plan.fill(all.Get(i).Message(), ids, columns)
		}
	}
}
