package client

import (
	"slices"
	"strings"

	"github.com/gpuaas/mesh/internal/names"
	"google.golang.org/protobuf/proto"
)

// follower prints the rows of a list as they change.
type follower[T proto.Message] struct {
	pr      *printer
	view    view[T]
	items   []T               // those that are shown, for the layout
	printed map[string]string // what was printed of each, by id
	sheet   *sheet[T]
}

// newFollower returns a follower of a list that has not been printed.
func newFollower[T proto.Message](pr *printer, v view[T]) *follower[T] {
	return &follower[T]{pr: pr, view: v, printed: map[string]string{}}
}

// begin prints the list as it is.
func (f *follower[T]) begin(items []T) error {
	for _, item := range items {
		f.printed[f.id(item)] = f.text(item)
	}
	if f.pr.structured() || f.pr.format == formatName {
		return list(f.pr, f.view, items, "")
	}
	f.items = slices.Clone(items)
	if len(items) == 0 && f.pr.tty {
		return table(f.pr, f.view.columns, items)
	}
	var cells [][]string
	f.sheet, cells = newSheet(f.pr, f.view.columns, items)
	return f.pr.write(f.sheet.header() + f.sheet.rows(cells))
}

// change prints an item that differs from what was printed last. An item that the filters now exclude is printed once
// as it is now, and then forgotten.
func (f *follower[T]) change(item T, kept bool) error {
	id, text := f.id(item), f.text(item)
	before, known := f.printed[id]
	switch {
	case !kept && !known, known && before == text:
		return nil
	case kept:
		f.printed[id] = text
	}
	if !kept {
		f.forget(id)
	}
	switch {
	case f.pr.structured():
		return object(f.pr, item)
	case f.pr.format == formatName:
		return f.pr.line(clean(f.view.name(item)))
	}
	f.items = slices.DeleteFunc(f.items, func(other T) bool { return f.id(other) == id })
	f.items = append(f.items, item)
	text = f.row(item)
	if !kept {
		f.forget(id)
	}
	return f.pr.write(text)
}

// row returns an item in the layout of the rows above it. If it does not fit, a new table begins.
func (f *follower[T]) row(item T) string {
	text := ""
	if f.sheet == nil || !f.sheet.fits(f.sheet.cells([]T{item})[0]) {
		sheet, _ := newSheet(f.pr, f.view.columns, f.items)
		if f.sheet == nil || sheet.header() != f.sheet.header() {
			text = sheet.header()
		}
		f.sheet = sheet
	}
	return text + f.sheet.rows(f.sheet.cells([]T{item}))
}

// skip takes an item as printed.
func (f *follower[T]) skip(item T) { f.printed[f.id(item)] = f.text(item) }

// forget takes an item as never printed.
func (f *follower[T]) forget(id string) {
	delete(f.printed, id)
	f.items = slices.DeleteFunc(f.items, func(item T) bool { return f.id(item) == id })
}

// knows reports whether an item was printed.
func (f *follower[T]) knows(item T) bool {
	_, known := f.printed[f.id(item)]
	return known
}

func (f *follower[T]) id(item T) string {
	if f.view.id == "" {
		return f.view.name(item)
	}
	return fieldsOf(item.ProtoReflect(), f.view.id)[0].value.String()
}

// text returns the text by which two states of an item are compared: the whole item if the output is data, else the
// shown columns without those that change all the time.
func (f *follower[T]) text(item T) string {
	if f.pr.structured() {
		raw, err := names.MarshalJSON(item)
		if err != nil {
			return ""
		}
		return string(raw)
	}
	cells := make([]string, 0, len(f.view.columns))
	for _, c := range f.view.columns {
		if !c.moves && (!c.wide || f.pr.format == formatWide) {
			cells = append(cells, c.show(f.pr, item))
		}
	}
	return strings.Join(cells, "\x00")
}

// retain forgets the printed items that are not in items, so that memory does not grow while a list is followed.
func (f *follower[T]) retain(items []T) {
	here := make(map[string]bool, len(items))
	for _, item := range items {
		here[f.id(item)] = true
	}
	for id := range f.printed {
		if !here[id] {
			delete(f.printed, id)
		}
	}
	f.items = slices.DeleteFunc(f.items, func(item T) bool { return !here[f.id(item)] })
}
