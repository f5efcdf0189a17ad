package firsthour_test

import (
	"slices"
	"strings"
	"testing"
)

// The comparison ignores the parts that differ from run to run, and nothing else.
func TestCompare(t *testing.T) {
	for _, c := range []struct {
		name           string
		shown, printed []string
		some, same     bool
	}{
		{
			name: "ages, ids and ports", same: true,
			shown:   []string{"n1 01a2d0f6-1122-7333-8444-a1b2c3d4e5f6 12s ago http://127.0.0.1:4000 took 1.5s"},
			printed: []string{"n1 01a2d0f6-9999-7333-8444-a1b2c3d4ffff 1h2m ago http://127.0.0.1:41234 took 30ms"},
		},
		{name: "another word", shown: []string{"acme/demo active"}, printed: []string{"acme/demo failed"}},
		{name: "a line more", shown: []string{"one"}, printed: []string{"one", "two"}},
		{
			name: "a warning that something was late", same: true,
			shown: []string{"ready"},
			printed: []string{
				`02:21:53.130 WRN policy not read cleanly error="load policy: context deadline exceeded"`,
				"ready",
			},
		},
		{name: "another warning", shown: []string{"ready"}, printed: []string{"02:21:53.130 WRN a replica differs", "ready"}},
		{
			name: "an error", shown: []string{"ready"},
			printed: []string{`02:21:53.130 ERR ended error="context deadline exceeded"`, "ready"},
		},
		{
			name: "a line more where lines vary", some: true, same: true, shown: []string{"one", "three"},
			printed: []string{"one", "two", "three"},
		},
		{
			name: "another last line where lines vary", some: true, shown: []string{"one", "three"},
			printed: []string{"one", "three", "[exit status 1]"},
		},
		{name: "nothing printed where lines vary", some: true, shown: []string{"one"}},
		{
			name: "a column that went", same: true,
			shown:   []string{"NAME  STATE   SINCE    NODE", "demo  active  10s ago  n1"},
			printed: []string{"NAME        STATE   NODE", "demo        active  n1"},
		},
		{
			name:    "another word in a column that stayed",
			shown:   []string{"NAME  STATE   SINCE    NODE", "demo  active  10s ago  n1"},
			printed: []string{"NAME  STATE   NODE", "demo  failed  n1"},
		},
		{
			name: "a cell cut short", same: true,
			shown:   []string{"NAME  ERROR", "demo  it exited wi..."},
			printed: []string{"NAME  ERROR", "demo  it exited with status 1"},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			if err := compare(c.shown, c.printed, c.some); (err == nil) != c.same {
				t.Errorf("compare = %v", err)
			}
		})
	}
}

func TestParse(t *testing.T) {
	page := strings.Join([]string{
		"text", "", `<!-- types "acme/demo" -->`, "```console", "$ one", "old", "```", "", "<!-- some lines -->",
		`<!-- interrupt at "step" -->`, "```console", "$ two", "```", "end",
	}, "\n")
	lines, blocks, err := parse(page)
	if err != nil || len(blocks) != 2 {
		t.Fatalf("%d blocks, %v", len(blocks), err)
	}
	if b := blocks[0]; b.command != "one" || b.how != "types" || b.text != "acme/demo" || b.some ||
		!slices.Equal(b.output, []string{"old"}) {
		t.Errorf("the first block is %+v", b)
	}
	if b := blocks[1]; b.command != "two" || b.how != "interrupt" || b.text != "step" || !b.some || len(b.output) != 0 {
		t.Errorf("the second block is %+v", b)
	}
	got := written(lines, blocks, [][]string{{"new", "lines"}, {"three"}})
	want := strings.NewReplacer("old", "new\nlines", "$ two", "$ two\nthree").Replace(page)
	if got != want {
		t.Errorf("written:\n%s\nwant:\n%s", got, want)
	}
	for _, bad := range []string{
		"```console\n$ one", "```console\nno command\n```",
		"<!-- type \"x\" -->\n```console\n$ one\n```",
	} {
		if _, _, err := parse(bad); err == nil {
			t.Errorf("%q is taken for a page", bad)
		}
	}
}

func TestTidy(t *testing.T) {
	got := tidy("\x1b[1mone\x1b[0m  \r\nwaiting\rtwo\r\n\r\n")
	if want := []string{"one", "two"}; !slices.Equal(got, want) {
		t.Errorf("tidy = %q, want %q", got, want)
	}
}
