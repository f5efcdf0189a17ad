package archtest

import (
	"bytes"
	"fmt"
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
	"unicode"
)

// glossary is the page that lists the words of the product, and those that are not used.
const glossary = "docs/glossary.md"

// unused is a word that no name has, and what is written in its place.
type unused struct {
	write  string
	except []string // names, or parts of names, that have it nevertheless
	within []string // directories and files in which it has the one meaning that the glossary gives it
}

// unusedWords reads the second table of the glossary.
func unusedWords(t *testing.T) map[string]unused {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root(t), filepath.FromSlash(glossary)))
	if err != nil {
		t.Fatal(err)
	}
	_, table, ok := strings.Cut(string(text), "## Words that are not used")
	if !ok {
		t.Fatalf("%s has no words that are not used", glossary)
	}
	table, _, _ = strings.Cut(table, "\n## ")
	words := map[string]unused{}
	for line := range strings.Lines(table) {
		cells := strings.Split(strings.TrimSpace(line), "|")
		if len(cells) != 5 || strings.HasPrefix(cells[1], "--") || strings.TrimSpace(cells[1]) == "not" {
			continue
		}
		u := unused{write: strings.TrimSpace(cells[2])}
		for name := range strings.SplitSeq(cells[3], ",") {
			switch name = strings.TrimSpace(name); {
			case strings.Contains(name, "/"):
				u.within = append(u.within, name)
			case name != "":
				u.except = append(u.except, name)
			}
		}
		for word := range strings.SplitSeq(cells[1], ",") {
			words[strings.TrimSpace(word)] = u
		}
	}
	if len(words) == 0 {
		t.Fatalf("%s lists no word", glossary)
	}
	return words
}

// TestTheGlossaryStandsInOrder: a reader finds a term by its first letters.
func TestTheGlossaryStandsInOrder(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(root(t), filepath.FromSlash(glossary)))
	if err != nil {
		t.Fatal(err)
	}
	table, _, _ := strings.Cut(string(text), "## Words that are not used")
	_, table, _ = strings.Cut(table, "|---|---|")
	var terms []string
	for row := range strings.Lines(table) {
		if cells := strings.Split(row, "|"); len(cells) > 2 {
			terms = append(terms, strings.ToLower(strings.NewReplacer("(", "", ")", "").Replace(strings.TrimSpace(cells[1]))))
		}
	}
	if len(terms) == 0 {
		t.Fatalf("%s lists no term", glossary)
	}
	for i := 1; i < len(terms); i++ {
		if terms[i-1] >= terms[i] {
			t.Errorf("%s: %q stands before %q", glossary, terms[i-1], terms[i])
		}
	}
}

// wordsOf splits a name in camel case or with underscores, dots or hyphens into its words, in lower case.
func wordsOf(name string) []string {
	var words []string
	var word []rune
	end := func() {
		if len(word) > 0 {
			words = append(words, strings.ToLower(string(word)))
		}
		word = nil
	}
	letters := []rune(name)
	for i, r := range letters {
		if !unicode.IsLetter(r) {
			end()
			continue
		}
		begins := unicode.IsUpper(r) && i > 0 &&
			(!unicode.IsUpper(letters[i-1]) || i+1 < len(letters) && unicode.IsLower(letters[i+1]))
		if begins {
			end()
		}
		word = append(word, r)
	}
	end()
	return words
}

// misnamed returns what is wrong with a name in the file of a path, or "".
func misnamed(words map[string]unused, file, name string) string {
	for _, word := range wordsOf(name) {
		u, found := words[word]
		if found && !slices.ContainsFunc(u.except, func(part string) bool { return strings.Contains(name, part) }) &&
			!slices.ContainsFunc(u.within, func(place string) bool { return strings.HasPrefix(file, place) }) {
			return fmt.Sprintf("%s: write %q in place of %q (%s)", name, u.write, word, glossary)
		}
	}
	return ""
}

// declared calls note with each name that a file declares, and with the names of its statements.
func declared(f *ast.File, note func(name string, at token.Pos)) {
	ident := func(e ast.Expr) {
		if id, ok := e.(*ast.Ident); ok && id != nil {
			note(id.Name, id.Pos())
		}
	}
	ast.Inspect(f, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.FuncDecl:
			ident(n.Name)
		case *ast.TypeSpec:
			ident(n.Name)
		case *ast.ValueSpec:
			for _, id := range n.Names {
				ident(id)
			}
		case *ast.Field:
			for _, id := range n.Names {
				ident(id)
			}
		case *ast.AssignStmt:
			if n.Tok == token.DEFINE {
				for _, e := range n.Lhs {
					ident(e)
				}
			}
		case *ast.RangeStmt:
			if n.Tok == token.DEFINE {
				ident(n.Key)
				ident(n.Value)
			}
		case *ast.CallExpr:
			called, ok := n.Fun.(*ast.SelectorExpr)
			if !ok || len(n.Args) < 2 || !strings.HasPrefix(called.Sel.Name, "Define") {
				return true
			}
			if lit, ok := n.Args[1].(*ast.BasicLit); ok && lit.Kind == token.STRING {
				if name, err := strconv.Unquote(lit.Value); err == nil {
					note(name, lit.Pos())
				}
			}
		}
		return true
	})
}

func TestGoNamesHaveTheWordsOfTheGlossary(t *testing.T) {
	words, tr := unusedWords(t), load(t)
	for _, p := range tr.pkgs {
		for _, f := range p.files {
			if wrong := misnamed(words, f.path, strings.TrimSuffix(path.Base(f.path), ".go")); wrong != "" {
				t.Errorf("%s: the file %s", f.path, wrong)
			}
			if f.generated {
				continue
			}
			declared(f.ast, func(name string, at token.Pos) {
				if wrong := misnamed(words, f.path, name); wrong != "" {
					t.Errorf("%s: %s", tr.fset.Position(at), wrong)
				}
			})
		}
	}
}

var (
	sqlComment = regexp.MustCompile(`(?m)--.*$`)
	sqlString  = regexp.MustCompile(`'(?:[^']|'')*'`)
	sqlName    = regexp.MustCompile(`[A-Za-z_]+`)
	protoNote  = regexp.MustCompile(`(?m)//.*$`)
	protoText  = regexp.MustCompile(`"(?:[^"\\]|\\.)*"`)
)

// earlierMigrations have names of before the glossary. Migrations do not change.
var earlierMigrations = []string{"00020_recovery.sql"}

func TestSQLAndProtoNamesHaveTheWordsOfTheGlossary(t *testing.T) {
	words, top := unusedWords(t), root(t)
	walk(t, func(rel string) {
		if slices.Contains(earlierMigrations, path.Base(rel)) {
			return
		}
		var drop []*regexp.Regexp
		switch path.Ext(rel) {
		case ".sql":
			drop = []*regexp.Regexp{sqlComment, sqlString}
		case ".proto":
			drop = []*regexp.Regexp{protoNote, protoText}
		default:
			return
		}
		text, err := os.ReadFile(filepath.Join(top, filepath.FromSlash(rel)))
		if err != nil {
			t.Fatal(err)
		}
		for _, re := range drop {
			text = re.ReplaceAll(text, nil)
		}
		for _, at := range sqlName.FindAllIndex(text, -1) {
			if wrong := misnamed(words, rel, string(text[at[0]:at[1]])); wrong != "" {
				t.Errorf("%s:%d: %s", rel, 1+bytes.Count(text[:at[0]], []byte("\n")), wrong)
			}
		}
	})
}

func TestWordsOf(t *testing.T) {
	for name, want := range map[string][]string{
		"boxKey":           {"box", "key"},
		"outbox":           {"outbox"},
		"TestABoxIsPlaced": {"test", "a", "box", "is", "placed"},
		"HTTPBox":          {"http", "box"},
		"findings.two_box": {"findings", "two", "box"},
		"box2":             {"box"},
	} {
		if got := wordsOf(name); !slices.Equal(got, want) {
			t.Errorf("the words of %s are %q, want %q", name, got, want)
		}
	}
	words := map[string]unused{
		"plane": {write: "cluster", except: []string{"ControlPlane"}, within: []string{"drill/kit/"}},
	}
	if wrong := misnamed(words, "mesh/dev/dev.go", "TestAnOlderControlPlane"); wrong != "" {
		t.Error(wrong)
	}
	if wrong := misnamed(words, "drill/kit/plane.go", "newPlane"); wrong != "" {
		t.Error(wrong)
	}
	if misnamed(words, "mesh/dev/dev.go", "newPlane") == "" {
		t.Error("newPlane is not refused")
	}
}
