package client

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"
	"sigs.k8s.io/yaml"

	"github.com/gpuaas/mesh/internal/names"
)

// Forms of the output.
const (
	formatTable = "table"
	formatWide  = "wide"
	formatJSON  = "json"
	formatJSONL = "jsonl"
	formatYAML  = "yaml"
	formatName  = "name"
)

var formats = []string{formatTable, formatWide, formatJSON, formatJSONL, formatYAML, formatName}

func known(format string) bool { return slices.Contains(formats, format) }

// Forms of times in tables.
const (
	timeAuto     = "auto"
	timeRelative = "relative"
	timeISO      = "iso"
)

// printer writes data to out in the requested form, and notes for people to err.
type printer struct {
	format   string
	out      io.Writer
	err      io.Writer
	tty      bool // out is a terminal
	color    bool
	relative bool // times in tables
	width    int
	now      func() time.Time
	in       io.Reader // the terminal on which a person can be asked; nil without one
	sure     bool      // the person need not be asked

	expression *filter // of --jq; nil without it
	// prints the results of the expression for JSON, until the bound context ends
	filter func(raw []byte, indent string) error
}

// bind binds the filter of the output to ctx, so that the end of ctx ends it.
func (pr *printer) bind(ctx context.Context) {
	if pr.expression != nil {
		pr.filter = func(raw []byte, indent string) error { return pr.expression.run(ctx, raw, pr.out, indent) }
	}
}

// view describes how a T is printed for people.
type view[T proto.Message] struct {
	name    func(T) string
	id      string // the field that identifies an item; empty: the name does
	columns []column[T]
	// more are the columns that only the details of one item show.
	more []column[T]
}

// member is a field that is printed in addition to those of the API's message.
type member struct {
	name  string
	value any
}

// with returns the member of a name.
func with(name string, value any) member { return member{name: name, value: value} }

// list prints items.
func list[T proto.Message](pr *printer, v view[T], items []T, token string, beside ...member) error {
	switch pr.format {
	case formatName:
		for _, item := range items {
			if err := pr.line(clean(v.name(item))); err != nil {
				return err
			}
		}
		return nil
	case formatJSONL:
		for _, item := range items {
			if err := object(pr, item); err != nil {
				return err
			}
		}
		return nil
	case formatJSON, formatYAML:
		raw := make([]json.RawMessage, len(items))
		for i, item := range items {
			one, err := names.MarshalJSON(item)
			if err != nil {
				return fmt.Errorf("print answer: %w", err)
			}
			raw[i] = one
		}
		return pr.document(members(append([]member{with("items", raw), with("next_page_token", token)}, beside...)...))
	}
	return table(pr, v.columns, items)
}

// one prints a single item.
func one[T proto.Message](pr *printer, v view[T], item T, beside ...member) error {
	switch pr.format {
	case formatName:
		return pr.line(clean(v.name(item)))
	case formatJSON, formatJSONL, formatYAML:
		return object(pr, item, beside...)
	}
	rows := make([][2]string, 0, len(v.columns)+len(v.more))
	for _, c := range append(slices.Clone(v.columns), v.more...) {
		value := c.show(pr, item)
		if value == "" && !slices.ContainsFunc(v.columns, func(known column[T]) bool { return known.title == c.title }) {
			continue
		}
		rows = append(rows, [2]string{c.title, value})
	}
	for _, m := range beside {
		rows = append(rows, [2]string{strings.ReplaceAll(strings.ToUpper(m.name), "_", " "), fmt.Sprint(m.value)})
	}
	return pr.pairs(rows)
}

// object prints one message as data.
func object(pr *printer, item proto.Message, beside ...member) error {
	raw, err := names.MarshalJSON(item)
	if err != nil {
		return fmt.Errorf("print answer: %w", err)
	}
	if len(beside) > 0 {
		extra := members(beside...)
		raw = append(append(raw[:len(raw)-1:len(raw)-1], ','), extra[1:]...)
	}
	return pr.document(raw)
}

// members returns a JSON object with the fields in the given order.
func members(fields ...member) []byte {
	var b bytes.Buffer
	b.WriteByte('{')
	for i, f := range fields {
		if i > 0 {
			b.WriteByte(',')
		}
		value, err := json.Marshal(f.value)
		if err != nil {
			value = []byte("null")
		}
		name, _ := json.Marshal(f.name)
		b.Write(name)
		b.WriteByte(':')
		b.Write(value)
	}
	b.WriteByte('}')
	return b.Bytes()
}

// document prints JSON data in the requested form, through the filter if there is one.
func (pr *printer) document(raw []byte) error {
	switch {
	case pr.filter != nil:
		indent := ""
		if pr.format == formatJSON && pr.tty {
			indent = "  "
		}
		return pr.filter(raw, indent)
	case pr.format == formatYAML:
		text, err := yaml.JSONToYAML(raw)
		if err != nil {
			return fmt.Errorf("print answer: %w", err)
		}
		return pr.write(string(text))
	case pr.format == formatJSONL:
		var compact bytes.Buffer
		if err := json.Compact(&compact, raw); err != nil {
			return fmt.Errorf("print answer: %w", err)
		}
		return pr.line(compact.String())
	}
	var indented bytes.Buffer
	if err := json.Indent(&indented, raw, "", "  "); err != nil {
		return fmt.Errorf("print answer: %w", err)
	}
	return pr.line(indented.String())
}

func (pr *printer) line(text string) error { return pr.write(text + "\n") }

func (pr *printer) write(text string) error {
	if _, err := io.WriteString(pr.out, text); err != nil {
		return fmt.Errorf("print: %w", err)
	}
	return nil
}

// structured reports whether the output is data for programs.
func (pr *printer) structured() bool {
	return pr.format == formatJSON || pr.format == formatJSONL || pr.format == formatYAML
}

// colours has the colours of the words for states.
var colours = map[string]string{
	"active": "32", "normal": "32", "succeeded": "32", "admitted": "32", "live": "32", "yes": "32", "ok": "32",
	"provisioning": "33", "running": "33", "waiting": "33", "recovering": "33", "temporary": "33", "queued": "33",
	"held": "33", "recreating": "33", "failed": "31", "stuck": "31", "lost": "31", "fenced": "31", "quarantined": "31",
	"no": "31", "down": "31", "outcome_unknown": "31", "operator_action_required": "31", "security_action_required": "31",
	"release_failed": "31",
	"abandoned":      "31",
}

func (pr *printer) paint(text string) string {
	code, ok := colours[strings.TrimSpace(text)]
	if !pr.color || !ok {
		return text
	}
	return "\x1b[" + code + "m" + text + "\x1b[0m"
}

// when returns a time as text: how long ago it was, or as RFC 3339.
func (pr *printer) when(t *timestamppb.Timestamp) string {
	if t == nil {
		return ""
	}
	at := t.AsTime()
	if !pr.relative {
		return at.UTC().Format("2006-01-02T15:04:05.000Z")
	}
	d := pr.now().Sub(at)
	if d < 0 {
		return "in " + roughly(-d)
	}
	return roughly(d) + " ago"
}

// messages returns API messages as JSON, for the values of members.
func messages[M proto.Message](items ...M) []json.RawMessage {
	out := make([]json.RawMessage, len(items))
	for i, item := range items {
		raw, err := names.MarshalJSON(item)
		if err != nil {
			raw = []byte("null")
		}
		out[i] = raw
	}
	return out
}
