package archtest

import (
	"go/ast"
	"go/build"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const module = "github.com/gpuaas/mesh"

// file is one Go file of the module.
type file struct {
	path      string // from the root, with slashes
	test      bool
	generated bool
	inBuild   bool // part of a normal build on Linux
	lines     int
	imports   []string
	ast       *ast.File
}

// pkg is one directory of Go files.
type pkg struct {
	dir   string // from the root, "." for the root itself
	name  string
	files []*file
}

// tree is the module in its present state, parsed once and shared by the tests.
type tree struct {
	root string
	fset *token.FileSet
	pkgs map[string]*pkg // by dir
}

// skippedDirs are the directories that no test enters, because their files are not ours or were built.
var skippedDirs = []string{".git", "bin", "node_modules", "testdata", "third_party", "dist"}

func root(t *testing.T) string {
	t.Helper()
	dir, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	for {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir
		}
		parent := filepath.Dir(dir)
		if parent == dir {
			t.Fatal("no go.mod above the test")
		}
		dir = parent
	}
}

// walk calls visit for every file of ours, with its path from the root.
func walk(t *testing.T, visit func(rel string)) {
	t.Helper()
	top := root(t)
	err := filepath.WalkDir(top, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(top, p)
		if err != nil {
			return err
		}
		if d.IsDir() {
			if slices.Contains(skippedDirs, d.Name()) {
				return filepath.SkipDir
			}
			return nil
		}
		if d.Type().IsRegular() {
			visit(filepath.ToSlash(rel))
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// parsed is the tree that the first test has loaded. No test changes it.
var parsed *tree

func load(t *testing.T) *tree {
	t.Helper()
	if parsed == nil {
		parsed = parse(t)
	}
	return parsed
}

func parse(t *testing.T) *tree {
	t.Helper()
	tr := &tree{root: root(t), fset: token.NewFileSet(), pkgs: map[string]*pkg{}}
	linux := build.Default
	linux.GOOS = "linux"
	walk(t, func(rel string) {
		if !strings.HasSuffix(rel, ".go") || strings.HasPrefix(rel, "gen/") {
			return
		}
		full := filepath.Join(tr.root, filepath.FromSlash(rel))
		src, err := os.ReadFile(full)
		if err != nil {
			t.Fatal(err)
		}
		syntax, err := parser.ParseFile(tr.fset, rel, src, parser.ParseComments|parser.SkipObjectResolution)
		if err != nil {
			t.Errorf("%s does not parse: %v", rel, err)
			return
		}
		match, err := linux.MatchFile(filepath.Dir(full), filepath.Base(full))
		if err != nil {
			t.Fatal(err)
		}
		f := &file{
			path:      rel,
			test:      strings.HasSuffix(rel, "_test.go"),
			generated: ast.IsGenerated(syntax),
			inBuild:   match,
			lines:     strings.Count(string(src), "\n"),
			ast:       syntax,
		}
		for _, spec := range syntax.Imports {
			name, err := strconv.Unquote(spec.Path.Value)
			if err != nil {
				t.Fatal(err)
			}
			f.imports = append(f.imports, name)
		}
		dir := path.Dir(rel)
		p := tr.pkgs[dir]
		if p == nil {
			p = &pkg{dir: dir}
			tr.pkgs[dir] = p
		}
		if !f.test || p.name == "" {
			p.name = strings.TrimSuffix(syntax.Name.Name, "_test")
		}
		p.files = append(p.files, f)
	})
	return tr
}

// under reports whether dir is top or below it.
func under(dir, top string) bool {
	return dir == top || strings.HasPrefix(dir, top+"/")
}

// underAny reports whether dir is one of tops or below one.
func underAny(dir string, tops []string) bool {
	return slices.ContainsFunc(tops, func(top string) bool { return under(dir, top) })
}

// dirOf returns the directory of an import of this module, or "".
func dirOf(imported string) string {
	if imported == module {
		return "."
	}
	if rest, ok := strings.CutPrefix(imported, module+"/"); ok {
		return rest
	}
	return ""
}
