package archtest

import (
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// architecture is the page that says what each package of a service decides.
const architecture = "docs/architecture.md"

var (
	packageHead = regexp.MustCompile(`^\| package(?: of ([a-z]+))? \| (?:decides|has) \|`)
	packageName = regexp.MustCompile("`([a-z/]+)`")
)

// tabled returns the directories of services that stand in the first columns of a page's tables of packages. A table
// names its packages from their service on, or is that of one service ("package of lifecycle") and names them from
// there.
func tabled(page string) []string {
	var dirs []string
	within, prefix := false, ""
	for line := range strings.Lines(page) {
		if head := packageHead.FindStringSubmatch(line); head != nil {
			within, prefix = true, "services/"
			if head[1] != "" {
				prefix += head[1] + "/"
			}
			continue
		}
		if within = within && strings.HasPrefix(line, "|"); !within {
			continue
		}
		first, _, _ := strings.Cut(line[1:], "|")
		for _, name := range packageName.FindAllStringSubmatch(first, -1) {
			dirs = append(dirs, prefix+name[1])
		}
	}
	return dirs
}

// TestTheArchitectureHasEveryPackageOfAService: a reader finds in docs/architecture.md what a package decides. The
// service itself has a row in the table of services, and packages of tests have none.
func TestTheArchitectureHasEveryPackageOfAService(t *testing.T) {
	tr := load(t)
	page, err := os.ReadFile(filepath.Join(tr.root, filepath.FromSlash(architecture)))
	if err != nil {
		t.Fatal(err)
	}
	rows := tabled(string(page))
	for _, dir := range slices.Sorted(maps.Keys(tr.pkgs)) {
		if !underAny(dir, services) || slices.Contains(services, dir) || strings.HasSuffix(dir, "test") {
			continue
		}
		if !slices.Contains(rows, dir) {
			t.Errorf("%s stands in no table of %s", dir, architecture)
		}
	}
	for i, dir := range rows {
		if tr.pkgs[dir] == nil {
			t.Errorf("%s has a row of %s, which is no package", architecture, dir)
		}
		if slices.Contains(rows[:i], dir) {
			t.Errorf("%s has two rows of %s", architecture, dir)
		}
	}
}

func TestTabled(t *testing.T) {
	page := "| package of a | decides |\n|---|---|\n| `b` · `b/c` | what `d` does |\n\n| `no` | row |\n\n" +
		"| package | has |\n|---|---|\n| `e/f` | more |\n"
	want := []string{"services/a/b", "services/a/b/c", "services/e/f"}
	if got := tabled(page); !slices.Equal(got, want) {
		t.Errorf("the packages are %q, want %q", got, want)
	}
}
