package output

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

	"github.com/gpuaas/mesh/cmd/gpuaas/client/human"
	"github.com/gpuaas/mesh/internal/names"
)

// Forms of the output.
const (
	FormatTable = "table"
	FormatWide  = "wide"
	FormatJSON  = "json"
	FormatJSONL = "jsonl"
	FormatYAML  = "yaml"
	FormatName  = "name"
)

// Formats are all forms of the output.
var Formats = []string{FormatTable, FormatWide, FormatJSON, FormatJSONL, FormatYAML, FormatName}

// Forms of times in tables.
const (
	TimeAuto     = "auto"
	TimeRelative = "relative"
	TimeISO      = "iso"
)

// Printer writes data to Out in the requested form. Notes for people go to Err.
type Printer struct {
	Format   string
	Out      io.Writer
	Err      io.Writer
	TTY      bool // Out is a terminal
	Color    bool
	Relative bool // times in tables
	Width    int
	Now      func() time.Time
	In       io.Reader // the terminal on which a person can be asked; nil without one
	Sure     bool      // the person need not be asked

	Expression *Filter // of --jq; nil without it
	// prints the results of the expression for JSON, until the bound context ends
	filter func(raw []byte, indent string) error
}

// Bind binds the filter of the output to ctx, so that the end of ctx ends it.
func (pr *Printer) Bind(ctx context.Context) {
	if pr.Expression != nil {
		pr.filter = func(raw []byte, indent string) error { return pr.Expression.run(ctx, raw, pr.Out, indent) }
	}
}

// View describes how a T is printed for people.
type View[T proto.Message] struct {
	Name    func(T) string
	ID      string // the field that identifies an item; empty: the name does
	Columns []Column[T]
	// More are the columns that only the details of one item show.
	More []Column[T]
}

// Member is a field that is printed in addition to those of the API's message.
type Member struct {
	name  string
	value any
}

// With returns the member of a name.
func With(name string, value any) Member { return Member{name: name, value: value} }

// List prints items.
func List[T proto.Message](pr *Printer, v View[T], items []T, token string, beside ...Member) error {
	switch pr.Format {
	case FormatName:
		return Names(pr, items, v.Name)
	case FormatJSONL:
		for _, item := range items {
			if err := Object(pr, item); err != nil {
				return err
			}
		}
		return nil
	case FormatJSON, FormatYAML:
		raw := make([]json.RawMessage, len(items))
		for i, item := range items {
			one, err := names.MarshalJSON(item)
			if err != nil {
				return fmt.Errorf("print answer: %w", err)
			}
			raw[i] = one
		}
		return pr.Document(Members(append([]Member{With("items", raw), With("next_page_token", token)}, beside...)...))
	}
	return Table(pr, v.Columns, items)
}

// Names prints the name of each item as a line.
func Names[T any](pr *Printer, items []T, name func(T) string) error {
	for _, item := range items {
		if err := pr.Line(human.Clean(name(item))); err != nil {
			return err
		}
	}
	return nil
}

// One prints a single item.
func One[T proto.Message](pr *Printer, v View[T], item T, beside ...Member) error {
	switch pr.Format {
	case FormatName:
		return pr.Line(human.Clean(v.Name(item)))
	case FormatJSON, FormatJSONL, FormatYAML:
		return Object(pr, item, beside...)
	}
	rows := make([][2]string, 0, len(v.Columns)+len(v.More))
	for _, c := range append(slices.Clone(v.Columns), v.More...) {
		value := c.show(pr, item)
		if value == "" && !slices.ContainsFunc(v.Columns, func(known Column[T]) bool { return known.Title == c.Title }) {
			continue
		}
		rows = append(rows, [2]string{c.Title, value})
	}
	for _, m := range beside {
		rows = append(rows, [2]string{strings.ReplaceAll(strings.ToUpper(m.name), "_", " "), fmt.Sprint(m.value)})
	}
	return pr.Pairs(rows)
}

// Object prints one message as data.
func Object(pr *Printer, item proto.Message, beside ...Member) error {
	raw, err := names.MarshalJSON(item)
	if err != nil {
		return fmt.Errorf("print answer: %w", err)
	}
	if len(beside) > 0 {
		extra := Members(beside...)
		raw = append(append(raw[:len(raw)-1:len(raw)-1], ','), extra[1:]...)
	}
	return pr.Document(raw)
}

// Members returns a JSON object with the fields in the given order.
func Members(fields ...Member) []byte {
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

// Document prints JSON data in the requested form, through the filter if there is one.
func (pr *Printer) Document(raw []byte) error {
	switch {
	case pr.filter != nil:
		indent := ""
		if pr.Format == FormatJSON && pr.TTY {
			indent = "  "
		}
		return pr.filter(raw, indent)
	case pr.Format == FormatYAML:
		text, err := yaml.JSONToYAML(raw)
		if err != nil {
			return fmt.Errorf("print answer: %w", err)
		}
		return pr.write(string(text))
	case pr.Format == FormatJSONL:
		var compact bytes.Buffer
		if err := json.Compact(&compact, raw); err != nil {
			return fmt.Errorf("print answer: %w", err)
		}
		return pr.Line(compact.String())
	}
	var indented bytes.Buffer
	if err := json.Indent(&indented, raw, "", "  "); err != nil {
		return fmt.Errorf("print answer: %w", err)
	}
	return pr.Line(indented.String())
}

// Line prints a text as one line.
func (pr *Printer) Line(text string) error { return pr.write(text + "\n") }

func (pr *Printer) write(text string) error {
	if _, err := io.WriteString(pr.Out, text); err != nil {
		return fmt.Errorf("print: %w", err)
	}
	return nil
}

// Structured reports whether the output is data for programs.
func (pr *Printer) Structured() bool {
	return pr.Format == FormatJSON || pr.Format == FormatJSONL || pr.Format == FormatYAML
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

// Paint returns the word for a state in its colour, and any other text unchanged.
func (pr *Printer) Paint(text string) string {
	code, ok := colours[strings.TrimSpace(text)]
	if !pr.Color || !ok {
		return text
	}
	return "\x1b[" + code + "m" + text + "\x1b[0m"
}

// When returns a time as text: how long ago it was, or as RFC 3339.
func (pr *Printer) When(t *timestamppb.Timestamp) string {
	if t == nil {
		return ""
	}
	at := t.AsTime()
	if !pr.Relative {
		return at.UTC().Format("2006-01-02T15:04:05.000Z")
	}
	d := pr.Now().Sub(at)
	if d < 0 {
		return "in " + human.Roughly(-d)
	}
	return human.Roughly(d) + " ago"
}

// Messages returns API messages as JSON, for the values of members.
func Messages[M proto.Message](items ...M) []json.RawMessage {
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
