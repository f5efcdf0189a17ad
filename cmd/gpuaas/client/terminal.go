package client

import (
	"os"

	"golang.org/x/term"
)

// Terminal reports whether a file is a terminal.
func Terminal(file *os.File) bool { return term.IsTerminal(int(file.Fd())) } //nolint:gosec // a descriptor fits an int

// Colors reports whether a file is a terminal that shows colours: TERM=dumb shows none, and NO_COLOR wants none.
func Colors(file *os.File) bool {
	kind := os.Getenv("TERM")
	return Terminal(file) && os.Getenv("NO_COLOR") == "" && kind != "dumb" && kind != ""
}
