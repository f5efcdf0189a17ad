package firsthour_test

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
)

// A page is text with blocks of a terminal:
//
//	```console
//	$ gpuaas nodes list
//	what it printed
//	[exit status 3]
//	```
//
// A comment right above a block determines how it is run:
//
//	<!-- stays until "TEXT" -->   the command goes on while the others run; the block ends when it has printed TEXT
//	<!-- types "TEXT" -->         TEXT is typed when the command asks
//	<!-- interrupt at "TEXT" -->  Ctrl-C is typed when the command has printed TEXT
//	<!-- some lines -->           which lines come, apart from the first and the last, depends on how fast the machine is
//
// A block whose command is ^C ends what stays.
type block struct {
	how     string // stays, types, interrupt, or empty
	text    string // of how
	some    bool
	command string
	output  []string
	from    int // of the lines of the page that are output: the first, and the one after the last
	to      int
}

var comment = regexp.MustCompile(`^<!-- (stays until|types|interrupt at) "(.*)" -->$`)

// parse reads the blocks of a page.
func parse(page string) ([]string, []block, error) {
	lines := strings.Split(page, "\n")
	var blocks []block
	for i := 0; i < len(lines); i++ {
		if lines[i] != "```console" {
			continue
		}
		b := block{}
		for above := i - 1; above >= 0 && strings.HasPrefix(lines[above], "<!-- "); above-- {
			found := comment.FindStringSubmatch(lines[above])
			switch {
			case found != nil:
				b.how, b.text = strings.Fields(found[1])[0], found[2]
			case lines[above] == "<!-- some lines -->":
				b.some = true
			default:
				return nil, nil, fmt.Errorf("line %d: this comment says nothing about a block: %s", above+1, lines[above])
			}
		}
		i++
		if i == len(lines) || (!strings.HasPrefix(lines[i], "$ ") && lines[i] != "^C") {
			return nil, nil, fmt.Errorf("line %d: a block begins with a command", i+1)
		}
		b.command = strings.TrimPrefix(lines[i], "$ ")
		b.from = i + 1
		b.to = b.from
		for b.to < len(lines) && lines[b.to] != "```" {
			b.to++
		}
		if b.to == len(lines) {
			return nil, nil, fmt.Errorf("line %d: the block does not end", b.from)
		}
		b.output = lines[b.from:b.to]
		blocks = append(blocks, b)
		i = b.to
	}
	return lines, blocks, nil
}

var reading = regexp.MustCompile(`^gpuaas (--context \S+ )?(status|explain|(\S+ (list|get|timeline|actions|logs)))\b`)

// reads reports whether the command changes nothing and ends by itself.
func (b block) reads() bool { return b.how == "" && reading.MatchString(b.command) }

// written returns the page with the output of its blocks replaced.
func written(lines []string, blocks []block, outputs [][]string) string {
	var out []string
	at := 0
	for i, b := range blocks {
		out = append(append(out, lines[at:b.from]...), outputs[i]...)
		at = b.to
	}
	return strings.Join(append(out, lines[at:]...), "\n")
}

// varying are the parts of a line that differ from run to run.
var varying = []struct {
	pattern *regexp.Regexp
	instead string
}{
	{regexp.MustCompile(`\b(serial|opened with certificate) [0-9a-f]+\b`), "$1 SERIAL"}, // of any length
	{regexp.MustCompile(`[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}`), "ID"},
	{regexp.MustCompile(`\b[0-9a-f]{12}(-\d+)?\b`), "ID"},
	{regexp.MustCompile(`\b[0-9a-f]{64}\b`), "DIGEST"},
	{regexp.MustCompile(`\b[0-9a-f]{8}\b`), "ID"},
	{regexp.MustCompile(`\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z?`), "TIME"},
	{regexp.MustCompile(`\d\d:\d\d:\d\d(\.\d+)?`), "TIME"},
	{regexp.MustCompile(`\b(in )?\d+(\.\d+)? ?(µs|ms|s|m|h|d)(\d+[smh])?( ago)?\b`), "AGE"},
	{regexp.MustCompile(`(127\.0\.0\.1|localhost):\d+`), "ADDRESS"},
	{regexp.MustCompile(`[^ ]*/gpuaas-[^ ]*`), "PATH"},
	{regexp.MustCompile(`^host .*`), "host HOST"},
	{regexp.MustCompile(`^gpuaas dev .*`), "gpuaas dev VERSION"},
	{regexp.MustCompile(`^(AGENT|VERSION) +\S+$`), "$1 VERSION"},
	{regexp.MustCompile(`\bat \d+, \d+ behind`), "at N, N behind"},
	{regexp.MustCompile(`\b\d+ behind`), "N behind"},
	{regexp.MustCompile(`\b(pid|position|port|uid) \d+`), "$1 N"},
	{regexp.MustCompile(`\d+(\.\d+)? ?[KMGT]i?B\b`), "SIZE"},
	{regexp.MustCompile(`[ \t]+`), " "},
}

// plain returns a line without its varying parts.
func plain(line string) string {
	for _, v := range varying {
		line = v.pattern.ReplaceAllString(line, v.instead)
	}
	return strings.TrimSpace(line)
}

var heading = regexp.MustCompile(`^[A-Z][A-Z ]*(  +[A-Z][A-Z ]*)+$`)

// tables returns the lines of tables, headings included: text is wrapped by the terminal, a table is not to be.
func tables(lines []string) []string {
	var out []string
	inside := false
	for _, line := range lines {
		inside = line != "" && (inside || heading.MatchString(line))
		if inside {
			out = append(out, line)
		}
	}
	return out
}

// cells returns the fields of a table's row by the heading's names: a column begins where its name does.
func cells(head, row string) map[string]string {
	out := map[string]string{}
	runes := []rune(row)
	starts := regexp.MustCompile(`(^|  )[A-Z]`).FindAllStringIndex(head, -1)
	for i, at := range starts {
		from, to, end := at[1]-1, len(runes), len(head)
		if i+1 < len(starts) {
			end = starts[i+1][1] - 1
			to = min(end, to)
		}
		from = min(from, to)
		out[strings.TrimSpace(head[at[1]-1:end])] = plain(string(runes[from:to]))
	}
	return out
}

// compare returns how the output of a command differs from that of the page. A table has as many columns as fit, and
// the width of an age or a step differs from run to run: only the columns that both have are compared.
//
// On a busy machine a mesh warns on its terminal that something came too late: such a warning is no difference.
func compare(shown, printed []string, some bool) error {
	printed = slices.DeleteFunc(slices.Clone(printed), late.MatchString)
	if some {
		if len(shown) == 0 || len(printed) == 0 {
			return fmt.Errorf("shown are %d lines, printed %d", len(shown), len(printed))
		}
		// With an empty line between them the last is no row of a table that the first is the heading of.
		shown = []string{shown[0], "", shown[len(shown)-1]}
		printed = []string{printed[0], "", printed[len(printed)-1]}
	}
	if len(shown) != len(printed) {
		return fmt.Errorf("shown are %d lines, printed %d", len(shown), len(printed))
	}
	var head, shownHead string
	for i := range shown {
		if heading.MatchString(shown[i]) && heading.MatchString(printed[i]) {
			shownHead, head = shown[i], printed[i]
			continue
		}
		if head != "" && shown[i] != "" {
			a, b := cells(shownHead, shown[i]), cells(head, printed[i])
			for name, want := range a {
				if got, both := b[name]; both && name != "NUMBER" && !same(want, got) {
					return fmt.Errorf("line %d, column %s: shown is %q, printed %q", i+1, name, want, got)
				}
			}
			continue
		}
		head = ""
		if want, got := plain(shown[i]), plain(printed[i]); want != got {
			return fmt.Errorf("line %d: shown is %q, printed %q", i+1, want, got)
		}
	}
	return nil
}

// late is a warning in the log that `gpuaas dev` writes on its terminal.
var late = regexp.MustCompile(`^\d\d:\d\d:\d\d\.\d{3} WRN .*(deadline exceeded|timeout)`)

// same compares cells, either of which may be cut short.
func same(shown, printed string) bool {
	if shown == printed {
		return true
	}
	cut := func(a, b string) bool {
		start, ok := strings.CutSuffix(a, "...")
		return ok && strings.HasPrefix(b, strings.TrimSuffix(start, "..."))
	}
	return cut(shown, printed) || cut(printed, shown)
}

// tidy returns the lines of a terminal's output: without escape sequences, carriage returns, and spaces at the end.
func tidy(raw string) []string {
	raw = regexp.MustCompile(`\x1b\[[0-9;?]*[a-zA-Z]`).ReplaceAllString(raw, "")
	lines := strings.Split(strings.ReplaceAll(raw, "\r\n", "\n"), "\n")
	for i, line := range lines {
		if at := strings.LastIndexByte(line, '\r'); at >= 0 {
			line = line[at+1:] // what was written over
		}
		lines[i] = strings.TrimRight(line, " \t")
	}
	for len(lines) > 0 && lines[len(lines)-1] == "" {
		lines = lines[:len(lines)-1]
	}
	return slices.Clip(lines)
}
