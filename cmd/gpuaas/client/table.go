package client

import (
	"slices"
	"strings"

	"github.com/charmbracelet/x/ansi"
)

const (
	// between stands between two columns.
	between = "  "
	// leastText is how narrow a free text may become before it goes like an optional column.
	leastText = 12
	// textShare is the part of the width, one in so many, that a free text has before an optional column goes.
	textShare = 5
	cut       = "..."
)

// sheet is the layout of a table: which columns are shown, and how wide they are. On a terminal it fits the width if its keys do; elsewhere fields are
// separated by tabs and nothing depends on a width.
type sheet[T any] struct {
	pr      *printer
	columns []column[T]
	widths  []int // of the first columns; the others stand below each row. nil: all are separated by tabs
}

// newSheet lays out columns for items and returns the items' cells.
func newSheet[T any](pr *printer, columns []column[T], items []T) (*sheet[T], [][]string) {
	s := &sheet[T]{pr: pr}
	s.columns = slices.DeleteFunc(slices.Clone(columns), func(c column[T]) bool { return c.wide && pr.format != formatWide })
	cells := s.cells(items)
	if !pr.tty {
		return s, cells
	}
	s.widths = make([]int, len(s.columns))
	for i := range s.columns {
		s.widths[i] = s.natural(i, cells)
	}
	if pr.format != formatWide {
		cells = s.fit(cells)
	}
	return s, cells
}

// cells are the texts of items in the sheet's columns.
func (s *sheet[T]) cells(items []T) [][]string {
	out := make([][]string, len(items))
	for i := range out {
		out[i] = make([]string, len(s.columns))
	}
	for i, c := range s.columns {
		column := make([]string, len(items))
		for n, item := range items {
			column[n] = clean(c.show(s.pr, item))
		}
		if c.id && s.pr.tty && s.pr.format != formatWide {
			column = shorten(column)
		}
		for n := range items {
			out[n][i] = column[n]
		}
	}
	return out
}

// fit makes the table as narrow as the terminal. Empty columns go first. Then free text is cut to its share, so that a long error does not cost the
// columns beside it, and optional columns go in their order. What room is left then is the text's again.
func (s *sheet[T]) fit(cells [][]string) [][]string {
	empty := func(i int) bool { return !slices.ContainsFunc(cells, func(row []string) bool { return row[i] != "" }) }
	for s.total() > s.pr.width {
		i := s.expendable(empty)
		if i < 0 {
			break
		}
		cells = s.without(i, cells)
	}
	for i := range s.widths {
		if over := s.total() - s.pr.width; s.columns[i].text && over > 0 {
			s.widths[i] = max(s.widths[i]-over, min(s.widths[i], max(s.pr.width/textShare, leastText, len(s.columns[i].title))))
		}
	}
	for s.total() > s.pr.width {
		i := s.expendable(func(int) bool { return true })
		if i < 0 {
			break
		}
		if over := s.total() - s.pr.width; s.columns[i].text && s.widths[i]-over >= max(leastText, len(s.columns[i].title)) {
			s.widths[i] -= over
			break
		}
		cells = s.without(i, cells)
	}
	for i := range s.widths {
		if room := s.pr.width - s.total(); s.columns[i].text && room > 0 {
			s.widths[i] = min(s.widths[i]+room, s.natural(i, cells))
		}
	}
	return cells
}

// natural is how wide a column is if nothing of it is cut.
func (s *sheet[T]) natural(i int, cells [][]string) int {
	width := ansi.StringWidth(s.columns[i].title)
	for _, row := range cells {
		width = max(width, ansi.StringWidth(row[i]))
	}
	return width
}

func (s *sheet[T]) total() int {
	total := len(between) * max(len(s.widths)-1, 0)
	for _, width := range s.widths {
		total += width
	}
	return total
}

// expendable is the optional column that goes next of those that may, -1 if there is none.
func (s *sheet[T]) expendable(may func(i int) bool) int {
	next := -1
	for i, c := range s.columns[:len(s.widths)] {
		if c.optional() && may(i) && (next < 0 || c.drop > s.columns[next].drop) {
			next = i
		}
	}
	return next
}

// without takes a column out of the rows: it goes, or stands below them.
func (s *sheet[T]) without(i int, cells [][]string) [][]string {
	gone := s.columns[i]
	s.columns = slices.Delete(s.columns, i, i+1)
	s.widths = slices.Delete(s.widths, i, i+1)
	if gone.below {
		s.columns = append(s.columns, gone)
	}
	for n, row := range cells {
		cell := row[i]
		cells[n] = slices.Delete(row, i, i+1)
		if gone.below {
			cells[n] = append(cells[n], cell)
		}
	}
	return cells
}

// header is the first line.
func (s *sheet[T]) header() string {
	shown := s.columns
	if s.widths != nil {
		shown = shown[:len(s.widths)]
	}
	titles := make([]string, len(shown))
	for i, c := range shown {
		titles[i] = c.title
	}
	return s.row(titles, false)
}

// rows are lines of cells.
func (s *sheet[T]) rows(cells [][]string) string {
	var out strings.Builder
	for _, row := range cells {
		out.WriteString(s.row(row, true))
	}
	return out.String()
}

// row is one line of cells, with those that stand below it.
func (s *sheet[T]) row(cells []string, painted bool) string {
	if s.widths == nil {
		return strings.Join(cells, "\t") + "\n"
	}
	var line strings.Builder
	pad := 0
	for i, cell := range cells[:len(s.widths)] {
		if s.columns[i].text {
			cell = ansi.Truncate(cell, s.widths[i], cut)
		}
		if i > 0 {
			pad += len(between)
		}
		if cell == "" {
			pad += s.widths[i]
			continue
		}
		line.WriteString(strings.Repeat(" ", pad))
		pad = max(s.widths[i]-ansi.StringWidth(cell), 0)
		if painted {
			cell = s.pr.paint(cell)
		}
		line.WriteString(cell)
	}
	for i := len(s.widths); i < len(cells); i++ {
		if cells[i] != "" {
			line.WriteString("\n" + wrapLine("  "+strings.ToLower(s.columns[i].title)+": "+cells[i], 4, s.pr.width))
		}
	}
	return line.String() + "\n"
}

// table prints items: aligned under a header on a terminal, separated by tabs elsewhere. Without items a terminal gets a note, and a pipe the header.
func table[T any](pr *printer, columns []column[T], items []T) error {
	if len(items) == 0 && pr.tty {
		note(pr.err, "none")
		return nil
	}
	s, cells := newSheet(pr, columns, items)
	return pr.write(s.header() + s.rows(cells))
}

// pairs prints one item as lines of name and value. Neither is cut.
func (pr *printer) pairs(rows [][2]string) error {
	width := 0
	for _, row := range rows {
		width = max(width, ansi.StringWidth(row[0]))
	}
	var out strings.Builder
	for _, row := range rows {
		for part := range strings.SplitSeq(row[1], "\n") {
			part = clean(part)
			switch {
			case !pr.tty:
				out.WriteString(row[0] + "\t" + part + "\n")
			case part == "":
				out.WriteString(row[0] + "\n")
			default:
				out.WriteString(row[0] + strings.Repeat(" ", width-ansi.StringWidth(row[0])) + between + pr.paint(part) + "\n")
			}
		}
	}
	return pr.write(out.String())
}

// section begins another part of an output with an empty line. In a pipe titles follow, so that each part has the header of its own fields; a part that
// brings its header needs none.
func (pr *printer) section(titles ...string) error {
	text := "\n"
	if len(titles) > 0 && !pr.tty {
		text += strings.Join(titles, "\t") + "\n"
	}
	return pr.write(text)
}

// under prints a table below other lines of the same answer; nothing if there are no items.
func under[T any](pr *printer, columns []column[T], items []T) error {
	if len(items) == 0 {
		return nil
	}
	if err := pr.section(); err != nil {
		return err
	}
	return table(pr, columns, items)
}
