package client

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/charmbracelet/x/ansi"
	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"

	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
)

// paging are the flags of every list.
type paging struct {
	limit int
	token string
	watch bool
}

func (g *paging) flags(cmd *cobra.Command) {
	cmd.Flags().IntVar(&g.limit, "limit", 0, "at most this many items (default all)")
	cmd.Flags().StringVar(&g.token, "page-token", "", "go on after an earlier list with --limit: its next_page_token")
	cmd.Flags().BoolVarP(&g.watch, "watch", "w", false, "print the list, then each row that changes, until Ctrl-C")
}

// source is where the items of a list come from.
type source[T proto.Message] struct {
	view  view[T]
	fetch func(ctx context.Context, size int32, token string) ([]T, string, error)
	// changed returns the item in a frame of a watch of the topic. Without a topic a list that is followed is polled.
	topic   readmodelv1.Topic
	changed func(*readmodelv1.WatchItem) T
	// keep reports whether the list's filters let an item of the watch through.
	keep func(T) bool
}

// show prints a list, and with --watch its changes until the context ends.
func show[T proto.Message](ctx context.Context, s *session, page paging, from source[T]) error {
	if page.limit < 0 {
		return Usage(fmt.Errorf("--limit %d: it is 1 or more, or 0 for all", page.limit))
	}
	if page.watch {
		switch {
		case s.format == formatJSON || s.format == formatYAML:
			return Usage(errors.New("--watch prints one row after another: it goes with -o table, wide, name or jsonl"))
		case page.token != "":
			return Usage(errors.New("--watch begins with the newest: it goes without --page-token"))
		}
	}
	items, next, err := pages(page.limit, page.token,
		func(size int32, token string) ([]T, string, error) { return from.fetch(ctx, size, token) })
	if err != nil {
		return err
	}
	if !page.watch {
		return list(s.printer, from.view, items, next)
	}
	rows := newFollower(s.printer, from.view)
	if err := rows.begin(items); err != nil {
		return err
	}
	if from.topic == readmodelv1.Topic_TOPIC_UNSPECIFIED {
		err = poll(ctx, s, rows, page, from.fetch)
	} else {
		err = s.follow(ctx, &readmodelv1.WatchRequest{Topics: []readmodelv1.Topic{from.topic}}, nil,
			func(changed *readmodelv1.WatchItem) (bool, error) {
				item := from.changed(changed)
				if !item.ProtoReflect().IsValid() {
					rows.forget(changed.GetId())
					return false, nil
				}
				if page.limit > 0 && changed.GetChange() == readmodelv1.Change_CHANGE_SNAPSHOT && !rows.knows(item) {
					rows.skip(item) // it existed before, and is not printed
					return false, nil
				}
				return false, rows.change(item, from.keep == nil || from.keep(item))
			})
	}
	if ctx.Err() != nil {
		return interrupted("interrupted")
	}
	return err
}

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

const (
	// listEvery is the interval at which a list without a watch is polled, and listAtMost the longest interval while polls
	// fail.
	listEvery  = 2 * time.Second
	listAtMost = 30 * time.Second
	// listSize is how many items a poll requests, the newest ones.
	listSize = 200
)

// poll reads the first page of a list at intervals and prints its changes.
func poll[T proto.Message](ctx context.Context, s *session, rows *follower[T], page paging,
	fetch func(context.Context, int32, string) ([]T, string, error),
) error {
	size := int32(listSize)
	if page.limit > 0 {
		size = int32(min(page.limit, listSize)) //nolint:gosec // at most listSize
	}
	pause, told := listEvery, false
	for {
		timer := time.NewTimer(pause)
		select {
		case <-ctx.Done():
			timer.Stop()
			return context.Cause(ctx)
		case <-timer.C:
		}
		items, _, err := fetch(ctx, size, "")
		if err != nil {
			if ctx.Err() != nil || !mends(err) {
				return err
			}
			if !told {
				note(s.err, "the list cannot be had (%s); asking again until it can", names.Of(fault.ReasonOf(err)))
			}
			told, pause = true, min(2*pause, listAtMost)
			continue
		}
		told, pause = false, listEvery
		for _, item := range slices.Backward(items) {
			if err := rows.change(item, true); err != nil {
				return err
			}
		}
		rows.retain(items)
	}
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

// fits reports whether cells can be shown in the widths of the sheet as well as in any other.
func (s *sheet[T]) fits(cells []string) bool {
	for i, width := range s.widths {
		if ansi.StringWidth(cells[i]) > width && (!s.columns[i].text || s.total() < s.pr.width) {
			return false
		}
	}
	return true
}
