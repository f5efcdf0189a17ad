package human

import (
	"strings"

	"github.com/charmbracelet/x/ansi"
)

// Wrap breaks a text into lines that are no wider than width. A line that ends in the middle of a sentence is
// joined with the next one; every other line stays separate, and an indented line keeps its indent.
func Wrap(text string, width int) string {
	var out []string
	open := false
	for line := range strings.SplitSeq(text, "\n") {
		if open && line != "" && line[0] != ' ' {
			out[len(out)-1] += " " + line
		} else {
			out = append(out, line)
		}
		open = line != "" && line[0] != ' ' && !strings.ContainsRune(".:;!?", rune(line[len(line)-1]))
	}
	for i, line := range out {
		out[i] = WrapLine(line, hanging(line), width)
	}
	return strings.Join(out, "\n")
}

// hanging returns the indent of the lines after the first: that of an item's text, if two spaces separate the item from
// it, else that of the line.
func hanging(line string) int {
	rest := strings.TrimLeft(line, " ")
	indent := len(line) - len(rest)
	if item, text, found := strings.Cut(rest, "  "); found && indent > 0 {
		return indent + len(item) + 2 + len(text) - len(strings.TrimLeft(text, " "))
	}
	return indent
}

// WrapLine breaks one line between words, and indents the following lines. Space before the first word and between
// words is kept, except at a break.
func WrapLine(line string, indent, width int) string {
	return wrapWords(strings.SplitAfter(line, " "), indent, width, "")
}

// WrapCommand breaks a shell command between its words in such a way that it remains one command.
func WrapCommand(line string, width int) string {
	var words []string
	quoted := false
	for _, word := range strings.SplitAfter(line, " ") {
		if quoted {
			words[len(words)-1] += word
		} else {
			words = append(words, word)
		}
		if strings.Count(word, "'")%2 == 1 {
			quoted = !quoted
		}
	}
	return wrapWords(words, 6, width, `\`)
}

// wrapWords lays out words, each with the space after it, and puts mark at the end of each line that continues.
func wrapWords(words []string, indent, width int, mark string) string {
	var out strings.Builder
	at, blank := 0, true // the column, and whether the line has only space so far
	for i, word := range words {
		need := ansi.StringWidth(strings.TrimRight(word, " "))
		if i < len(words)-1 && mark != "" {
			need += 1 + len(mark)
		}
		if !blank && need > 0 && at+need > width {
			trimmed := strings.TrimRight(out.String(), " ")
			out.Reset()
			out.WriteString(trimmed + OnlyIf(mark != "", " "+mark) + "\n" + strings.Repeat(" ", indent))
			at, blank = indent, true
		}
		out.WriteString(word)
		at += ansi.StringWidth(word)
		blank = blank && strings.TrimSpace(word) == ""
	}
	return strings.TrimRight(out.String(), " ")
}
