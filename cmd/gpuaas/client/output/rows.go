package output

import (
	"fmt"
	"io"
	"os"
	"strings"
	"text/tabwriter"
)

// Rows prints lines of fields as all tables are printed: aligned on a terminal, separated by tabs elsewhere.
func Rows(out io.Writer, rows [][]string) error {
	if file, ok := out.(*os.File); ok && Terminal(file) {
		aligned := tabwriter.NewWriter(out, 0, 8, len(between), ' ', 0)
		for _, row := range rows {
			fmt.Fprintln(aligned, strings.Join(row, "\t")) // Flush returns it
		}
		return aligned.Flush()
	}
	for _, row := range rows {
		if _, err := fmt.Fprintln(out, strings.Join(row, "\t")); err != nil {
			return fmt.Errorf("print: %w", err)
		}
	}
	return nil
}
