package archtest

import (
	"bytes"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// mark is a text that no file of ours contains. A file without any of the words has no mark: a search for the words
// costs far less than one for the pattern.
type mark struct {
	what    string
	words   []string
	pattern *regexp.Regexp
}

// find returns the positions of the first marks in a text.
func (m mark) find(text []byte) [][]int {
	if !slices.ContainsFunc(m.words, func(word string) bool { return bytes.Contains(text, []byte(word)) }) {
		return nil
	}
	return m.pattern.FindAllIndex(text, 3)
}

// forbidden are the marks that no file of ours contains, because they are valid on one machine only. The patterns are
// written so that they do not match themselves.
var forbidden = []mark{
	{
		"the path of a person's home",
		[]string{"/home/", "/root/"},
		regexp.MustCompile(`/(home/[a-z][a-z0-9_-]*|[r]oot)/[A-Za-z0-9._-]`),
	},
	{
		"the path of a working directory",
		[]string{"/work/", "/tmp/m"},
		regexp.MustCompile(`/[w]ork/(main|shared)|/[t]mp/mesh\b`),
	},
	{
		"the host of a registry",
		[]string{"proxy.", "sum.g", "registry.", "deb.d"},
		regexp.MustCompile(
			`\b(proxy\.[g]olang\.org|sum\.[g]olang\.org|registry\.[n]pmjs\.org|registry\.[y]arnpkg\.com|` +
				`deb\.[d]ebian\.org|goproxy\.[a-z]+)\b`,
		),
	},
	{"an unfinished mark", []string{"TOD", "FIXM", "XXX"}, regexp.MustCompile(`(//|#|/\*|--)\s*(T[O]DO|F[I]XME|X[X]X)\b`)},
}

// textual are the suffixes of the files in which marks are searched.
var textual = []string{
	".go", ".proto", ".sql", ".md", ".yaml", ".yml", ".json", ".sh", ".ts", ".tsx", ".css", ".html", ".toml", ".service",
	".env", ".example", ".mk", ".tpl", ".txt",
}

func TestContent(t *testing.T) {
	top := root(t)
	walk(t, func(rel string) {
		base := path.Base(rel)
		named := slices.Contains([]string{"Makefile", "Dockerfile", "run"}, base)
		if (!named && !slices.Contains(textual, path.Ext(base))) || strings.HasPrefix(rel, "gen/") {
			return
		}
		content, err := os.ReadFile(filepath.Join(top, filepath.FromSlash(rel)))
		if os.IsNotExist(err) {
			return // the file was removed after the walk listed it
		}
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range forbidden {
			for _, at := range f.find(content) {
				line := 1 + bytes.Count(content[:at[0]], []byte("\n"))
				t.Errorf("%s:%d holds %s: %s", rel, line, f.what, content[at[0]:at[1]])
			}
		}
	})
}

func TestForbiddenPatterns(t *testing.T) {
	tests := []struct {
		text string
		want bool
	}{
		{"/ho" + "me/alice/x", true},
		{"/ro" + "ot/.cache", true},
		{"$HOME/.cache", false},
		{"/wo" + "rk/main/x", true},
		{"/work", false},
		{"https://proxy." + "golang.org", true},
		{"golang.org/x/sync", false},
		{"// TO" + "DO: later", true},
		{"context.TO" + "DO()", false},
		{"# FI" + "XME", true},
		{"-- XX" + "X", true},
		{"/tm" + "p/mesh", true},
	}
	for _, tt := range tests {
		got := slices.ContainsFunc(forbidden, func(m mark) bool { return m.find([]byte(tt.text)) != nil })
		if got != tt.want {
			t.Errorf("%q: forbidden is %t, want %t", tt.text, got, tt.want)
		}
	}
}
