package output

import (
	"os"

	"golang.org/x/term"
)

// Terminal reports whether a file is a terminal.
func Terminal(file *os.File) bool { return term.IsTerminal(int(file.Fd())) } // a descriptor fits an int

// Colors reports whether a file is a terminal that shows colours. It returns false if TERM is dumb or empty, or if
// NO_COLOR is set.
func Colors(file *os.File) bool {
	kind := os.Getenv("TERM")
	return Terminal(file) && os.Getenv("NO_COLOR") == "" && kind != "dumb" && kind != ""
}
