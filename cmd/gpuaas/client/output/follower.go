package output

import (
	"maps"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/human"
	"github.com/gpuaas/mesh/internal/names"
)

// Follower prints the rows of a list as they change.
type Follower[T proto.Message] struct {
	pr      *Printer
	view    View[T]
	items   []T               // those that are shown, for the layout
	printed map[string]string // what was printed of each, by id
	sheet   *sheet[T]
}

// NewFollower returns a follower of a list that has not been printed.
func NewFollower[T proto.Message](pr *Printer, v View[T]) *Follower[T] {
	return &Follower[T]{pr: pr, view: v, printed: map[string]string{}}
}

// Begin prints the list as it is.
func (f *Follower[T]) Begin(items []T) error {
	for _, item := range items {
		f.printed[f.id(item)] = f.text(item)
	}
	if f.pr.Structured() || f.pr.Format == FormatName {
		return List(f.pr, f.view, items, "")
	}
	f.items = slices.Clone(items)
	if len(items) == 0 && f.pr.TTY {
		return Table(f.pr, f.view.Columns, items)
	}
	var cells [][]string
	f.sheet, cells = newSheet(f.pr, f.view.Columns, items)
	return f.pr.write(f.sheet.header() + f.sheet.rows(cells))
}

// Change prints an item that differs from what was printed last. An item that the filters now exclude is printed once
// as it is now, and then forgotten.
func (f *Follower[T]) Change(item T, kept bool) error {
	id, text := f.id(item), f.text(item)
	before, known := f.printed[id]
	switch {
	case !kept && !known, known && before == text:
		return nil
	case kept:
		f.printed[id] = text
	}
	if !kept {
		f.Forget(id)
	}
	switch {
	case f.pr.Structured():
		return Object(f.pr, item)
	case f.pr.Format == FormatName:
		return f.pr.Line(human.Clean(f.view.Name(item)))
	}
	f.items = slices.DeleteFunc(f.items, func(other T) bool { return f.id(other) == id })
	f.items = append(f.items, item)
	text = f.row(item)
	if !kept {
		f.Forget(id)
	}
	return f.pr.write(text)
}

// row returns an item in the layout of the rows above it. If it does not fit, a new table begins.
func (f *Follower[T]) row(item T) string {
	text := ""
	if f.sheet == nil || !f.sheet.fits(f.sheet.cells([]T{item})[0]) {
		sheet, _ := newSheet(f.pr, f.view.Columns, f.items)
		if f.sheet == nil || sheet.header() != f.sheet.header() {
			text = sheet.header()
		}
		f.sheet = sheet
	}
	return text + f.sheet.rows(f.sheet.cells([]T{item}))
}

// Skip takes an item as printed.
func (f *Follower[T]) Skip(item T) { f.printed[f.id(item)] = f.text(item) }

// Forget takes an item as never printed.
func (f *Follower[T]) Forget(id string) {
	delete(f.printed, id)
	f.items = slices.DeleteFunc(f.items, func(item T) bool { return f.id(item) == id })
}

// Knows reports whether an item was printed.
func (f *Follower[T]) Knows(item T) bool {
	_, known := f.printed[f.id(item)]
	return known
}

func (f *Follower[T]) id(item T) string {
	if f.view.ID == "" {
		return f.view.Name(item)
	}
	return fieldsOf(item.ProtoReflect(), f.view.ID)[0].value.String()
}

// text returns the text by which two states of an item are compared: the whole item if the output is data, else the
// shown columns without those that change all the time.
func (f *Follower[T]) text(item T) string {
	if f.pr.Structured() {
		raw, err := names.MarshalJSON(item)
		if err != nil {
			return ""
		}
		return string(raw)
	}
	cells := make([]string, 0, len(f.view.Columns))
	for _, c := range f.view.Columns {
		if !c.Moves && (!c.Wide || f.pr.Format == FormatWide) {
			cells = append(cells, c.show(f.pr, item))
		}
	}
	return strings.Join(cells, "\x00")
}

// Retain forgets the printed items that are not in items, so that memory does not grow while a list is followed.
func (f *Follower[T]) Retain(items []T) {
	here := make(map[string]bool, len(items))
	for _, item := range items {
		here[f.id(item)] = true
	}
	maps.DeleteFunc(f.printed, func(id, _ string) bool { return !here[id] })
	f.items = slices.DeleteFunc(f.items, func(item T) bool { return !here[f.id(item)] })
}
