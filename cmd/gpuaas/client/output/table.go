package output

import (
	"slices"
	"strings"

	"github.com/charmbracelet/x/ansi"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/human"
)

const (
	// between separates two columns.
	between = "  "
	// leastText is the smallest width of a free text; below that its column is dropped like an optional one.
	leastText = 12
	// textShare is the fraction of the width (1/textShare) to which free text is cut before an optional column is dropped.
	textShare = 5
	cut       = "..."
)

// sheet is the layout of a table: which columns are shown, and how wide they are. On a terminal it fits the width if
// its key columns do; elsewhere fields are separated by tabs whatever the width.
type sheet[T any] struct {
	pr      *Printer
	columns []Column[T]
	widths  []int // of the first columns; the others are printed below each row. nil: all are separated by tabs
}

// newSheet lays out columns for items and returns the items' cells.
func newSheet[T any](pr *Printer, columns []Column[T], items []T) (*sheet[T], [][]string) {
	s := &sheet[T]{pr: pr}
	s.columns = slices.DeleteFunc(slices.Clone(columns),
		func(c Column[T]) bool { return c.Wide && pr.Format != FormatWide })
	cells := s.cells(items)
	if !pr.TTY {
		return s, cells
	}
	s.widths = make([]int, len(s.columns))
	for i := range s.columns {
		s.widths[i] = s.natural(i, cells)
	}
	if pr.Format != FormatWide {
		cells = s.fit(cells)
	}
	return s, cells
}

// cells returns the texts of items in the sheet's columns.
func (s *sheet[T]) cells(items []T) [][]string {
	out := make([][]string, len(items))
	for i := range out {
		out[i] = make([]string, len(s.columns))
	}
	for i, c := range s.columns {
		column := make([]string, len(items))
		for n, item := range items {
			column[n] = human.Clean(c.show(s.pr, item))
		}
		if c.ID && s.pr.TTY && s.pr.Format != FormatWide {
			column = ShortIDs(column)
		}
		for n := range items {
			out[n][i] = column[n]
		}
	}
	return out
}

// fit makes the table as narrow as the terminal. It drops empty columns first. Then it cuts free text to its share, so
// that a long error does not displace other columns, and drops optional columns in their order. Free text gets the
// width that is left.
func (s *sheet[T]) fit(cells [][]string) [][]string {
	empty := func(i int) bool { return !slices.ContainsFunc(cells, func(row []string) bool { return row[i] != "" }) }
	for s.total() > s.pr.Width {
		i := s.expendable(empty)
		if i < 0 {
			break
		}
		cells = s.without(i, cells)
	}
	for i := range s.widths {
		if over := s.total() - s.pr.Width; s.columns[i].Text && over > 0 {
			s.widths[i] = max(s.widths[i]-over, min(s.widths[i], max(s.pr.Width/textShare, leastText, len(s.columns[i].Title))))
		}
	}
	for s.total() > s.pr.Width {
		i := s.expendable(func(int) bool { return true })
		if i < 0 {
			break
		}
		if over := s.total() - s.pr.Width; s.columns[i].Text && s.widths[i]-over >= max(leastText, len(s.columns[i].Title)) {
			s.widths[i] -= over
			break
		}
		cells = s.without(i, cells)
	}
	for i := range s.widths {
		if room := s.pr.Width - s.total(); s.columns[i].Text && room > 0 {
			s.widths[i] = min(s.widths[i]+room, s.natural(i, cells))
		}
	}
	return cells
}

// natural returns the width of a column if none of its cells is cut.
func (s *sheet[T]) natural(i int, cells [][]string) int {
	width := ansi.StringWidth(s.columns[i].Title)
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

// expendable returns the optional column to drop next among those for which may returns true, or -1 if there is none.
func (s *sheet[T]) expendable(may func(i int) bool) int {
	next := -1
	for i, c := range s.columns[:len(s.widths)] {
		if c.optional() && may(i) && (next < 0 || c.Drop > s.columns[next].Drop) {
			next = i
		}
	}
	return next
}

// without removes a column from the rows: it is dropped, or moves below each row.
func (s *sheet[T]) without(i int, cells [][]string) [][]string {
	gone := s.columns[i]
	s.columns = slices.Delete(s.columns, i, i+1)
	s.widths = slices.Delete(s.widths, i, i+1)
	if gone.Below {
		s.columns = append(s.columns, gone)
	}
	for n, row := range cells {
		cell := row[i]
		cells[n] = slices.Delete(row, i, i+1)
		if gone.Below {
			cells[n] = append(cells[n], cell)
		}
	}
	return cells
}

// header returns the first line.
func (s *sheet[T]) header() string {
	shown := s.columns
	if s.widths != nil {
		shown = shown[:len(s.widths)]
	}
	titles := make([]string, len(shown))
	for i, c := range shown {
		titles[i] = c.Title
	}
	return s.row(titles, false)
}

// rows returns the lines of the cells.
func (s *sheet[T]) rows(cells [][]string) string {
	var out strings.Builder
	for _, row := range cells {
		out.WriteString(s.row(row, true))
	}
	return out.String()
}

// row returns one line of cells, followed by the lines of the columns below it.
func (s *sheet[T]) row(cells []string, painted bool) string {
	if s.widths == nil {
		return strings.Join(cells, "\t") + "\n"
	}
	var line strings.Builder
	pad := 0
	for i, cell := range cells[:len(s.widths)] {
		if s.columns[i].Text {
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
			cell = s.pr.Paint(cell)
		}
		line.WriteString(cell)
	}
	for i := len(s.widths); i < len(cells); i++ {
		if cells[i] != "" {
			line.WriteString("\n" + human.WrapLine("  "+strings.ToLower(s.columns[i].Title)+": "+cells[i], 4, s.pr.Width))
		}
	}
	return line.String() + "\n"
}

// Table prints items: aligned under a header on a terminal, separated by tabs elsewhere. Without items a terminal gets
// a note, and a pipe the header.
func Table[T any](pr *Printer, columns []Column[T], items []T) error {
	if len(items) == 0 && pr.TTY {
		human.Note(pr.Err, "none")
		return nil
	}
	s, cells := newSheet(pr, columns, items)
	return pr.write(s.header() + s.rows(cells))
}

// Pairs prints one item as lines of name and value, without cutting either.
func (pr *Printer) Pairs(rows [][2]string) error {
	width := 0
	for _, row := range rows {
		width = max(width, ansi.StringWidth(row[0]))
	}
	var out strings.Builder
	for _, row := range rows {
		for part := range strings.SplitSeq(row[1], "\n") {
			part = human.Clean(part)
			switch {
			case !pr.TTY:
				out.WriteString(row[0] + "\t" + part + "\n")
			case part == "":
				out.WriteString(row[0] + "\n")
			default:
				out.WriteString(row[0] + strings.Repeat(" ", width-ansi.StringWidth(row[0])) + between + pr.Paint(part) + "\n")
			}
		}
	}
	return pr.write(out.String())
}

// Section begins another part of an output with an empty line. In a pipe the titles follow, so that each part has a
// header for its own fields; a part that prints its header itself has none.
func (pr *Printer) Section(titles ...string) error {
	text := "\n"
	if len(titles) > 0 && !pr.TTY {
		text += strings.Join(titles, "\t") + "\n"
	}
	return pr.write(text)
}

// Under prints a table below other lines of the same output, which above is the error of, or nothing if there are no
// items or the output is not for people.
func Under[T any](pr *Printer, above error, columns []Column[T], items []T) error {
	if above != nil || len(items) == 0 || pr.Structured() || pr.Format == FormatName {
		return above
	}
	if err := pr.Section(); err != nil {
		return err
	}
	return Table(pr, columns, items)
}

// fits reports whether cells can be shown in the widths of the sheet as well as in any other.
func (s *sheet[T]) fits(cells []string) bool {
	for i, width := range s.widths {
		if ansi.StringWidth(cells[i]) > width && (!s.columns[i].Text || s.total() < s.pr.Width) {
			return false
		}
	}
	return true
}
