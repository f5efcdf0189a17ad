package archtest

import (
	"go/ast"
	"go/token"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"unicode/utf8"
)

// topLevel are the directories that the repository has, and no others: a new
// one is a decision about the layout.
var topLevel = []string{
	"agent", "bench", "bin", "chaos", "cmd", "console", "deploy", "devstack", "docs", "drill", "gen", "internal", "mesh",
	"proto", "scripts", "services", "third_party",
}

// Numbers of lines above which a file or a package is taken to be about more than one thing.
const (
	maxLines        = 400
	maxTestLines    = 700
	maxPackageLines = 2500 // without tests
)

func TestTopLevelDirectories(t *testing.T) {
	entries, err := os.ReadDir(root(t))
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if e.IsDir() && !strings.HasPrefix(e.Name(), ".") && !slices.Contains(topLevel, e.Name()) {
			t.Errorf("the layout has no directory %s", e.Name())
		}
	}
}

func TestServices(t *testing.T) {
	entries, err := os.ReadDir(filepath.Join(root(t), "services"))
	if os.IsNotExist(err) {
		return
	}
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if e.IsDir() && !slices.Contains(services, "services/"+e.Name()) {
			t.Errorf("the design has no service %s", e.Name())
		}
	}
}

func TestPackageNames(t *testing.T) {
	empty := []string{"util", "utils", "common", "helper", "helpers", "model", "models", "misc", "shared", "types"}
	for _, p := range load(t).pkgs {
		if slices.Contains(empty, p.name) || slices.Contains(empty, path.Base(p.dir)) {
			t.Errorf("%s: a package is named for its duty, not %s", p.dir, p.name)
		}
	}
}

func TestPackageComments(t *testing.T) {
	for _, p := range load(t).pkgs {
		documented, generated := false, true
		for _, f := range p.files {
			generated = generated && f.generated
			if f.ast.Doc != nil && strings.TrimSpace(f.ast.Doc.Text()) != "" {
				documented = true
			}
		}
		if !documented && !generated && !strings.HasSuffix(p.dir, "internal/db") {
			t.Errorf("%s has no package comment", p.dir)
		}
	}
}

func TestLengths(t *testing.T) {
	for _, p := range load(t).pkgs {
		all := 0
		for _, f := range p.files {
			most := maxLines
			switch {
			case f.generated:
				continue
			case f.test:
				most = maxTestLines
			default:
				all += f.lines
			}
			if f.lines > most {
				t.Errorf("%s has %d lines, more than %d", f.path, f.lines, most)
			}
		}
		if all > maxPackageLines {
			t.Errorf("%s has %d lines without tests, more than %d", p.dir, all, maxPackageLines)
		}
	}
}

// widest is the greatest number of columns of a line of SQL, as lll has it for Go. foldedFrom is the first migration
// that is held to it: migrations before it are not edited.
const (
	widest     = 120
	foldedFrom = 416
)

// TestLinesOfSQLAreFolded checks the files of SQL, among them the migrations from foldedFrom on.
func TestLinesOfSQLAreFolded(t *testing.T) {
	top, seen := root(t), 0
	walk(t, func(rel string) {
		if path.Ext(rel) != ".sql" {
			return
		}
		number, _, _ := strings.Cut(path.Base(rel), "_")
		if version, err := strconv.Atoi(number); err == nil && version < foldedFrom {
			return
		}
		text, err := os.ReadFile(filepath.Join(top, filepath.FromSlash(rel)))
		if err != nil {
			t.Fatal(err)
		}
		seen++
		at := 0
		for line := range strings.Lines(string(text)) {
			at++
			if n := utf8.RuneCountInString(strings.TrimRight(line, "\n")); n > widest {
				t.Errorf("%s:%d has %d columns, more than %d", rel, at, n, widest)
			}
		}
	})
	if seen == 0 {
		t.Error("no file of SQL was found")
	}
}

// sql finds a statement at the beginning of a string.
var sql = regexp.MustCompile(`(?is)^\s*(select|insert\s+into|update\s+\w+|delete\s+from|with\s+\w+\s+as)\b`)

// TestServiceRootsOnlyWire: the root of a service constructs its packages and runs them. An SQL statement there is a
// decision that belongs in a package.
func TestServiceRootsOnlyWire(t *testing.T) {
	tr := load(t)
	for _, s := range services {
		p := tr.pkgs[s]
		if p == nil {
			continue
		}
		for _, f := range p.files {
			if f.test {
				continue
			}
			ast.Inspect(f.ast, func(n ast.Node) bool {
				lit, ok := n.(*ast.BasicLit)
				if ok && lit.Kind == token.STRING && sql.MatchString(strings.Trim(lit.Value, "`\"")) {
					t.Errorf("%s: a statement in a service's root", tr.fset.Position(lit.Pos()))
				}
				return true
			})
		}
	}
}

// TestTestsDoNotSleepOrSkip: a sleep outside a synctest bubble makes a test slow
// and flaky at once, and a skipped test proves nothing. A test is left out only
// when -short asks for the ones without I/O.
func TestTestsDoNotSleepOrSkip(t *testing.T) {
	tr := load(t)
	for _, p := range tr.pkgs {
		for _, f := range p.files {
			if !f.test || under(p.dir, "internal/testkit") {
				continue
			}
			bubble := slices.Contains(f.imports, "testing/synctest")
			ast.Inspect(f.ast, func(n ast.Node) bool {
				if branch, ok := n.(*ast.IfStmt); ok && isShort(branch.Cond) {
					return false
				}
				sel, ok := n.(*ast.SelectorExpr)
				if !ok {
					return true
				}
				on, ok := sel.X.(*ast.Ident)
				if !ok {
					return true
				}
				at := tr.fset.Position(sel.Pos())
				switch {
				case on.Name == "time" && sel.Sel.Name == "Sleep" && !bubble:
					t.Errorf("%s: wait for what is meant, or sleep inside synctest", at)
				case slices.Contains([]string{"t", "tb", "b"}, on.Name) &&
					slices.Contains([]string{"Skip", "Skipf", "SkipNow"}, sel.Sel.Name):
					t.Errorf("%s: a skipped test proves nothing", at)
				}
				return true
			})
		}
	}
}

// isShort reports whether a condition is testing.Short().
func isShort(cond ast.Expr) bool {
	call, ok := cond.(*ast.CallExpr)
	if !ok {
		return false
	}
	sel, ok := call.Fun.(*ast.SelectorExpr)
	if !ok {
		return false
	}
	on, ok := sel.X.(*ast.Ident)
	return ok && on.Name == "testing" && sel.Sel.Name == "Short"
}
