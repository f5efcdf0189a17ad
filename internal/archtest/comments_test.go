package archtest

import (
	"go/ast"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// phrase is what no comment has, and what is written in its place.
type phrase struct {
	text  string
	write string
	verb  bool // only where it follows the name at the beginning of a doc comment
	find  *regexp.Regexp
}

// unusedPhrases reads the glossary's table of comments.
func unusedPhrases(t *testing.T) []phrase {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root(t), filepath.FromSlash(glossary)))
	if err != nil {
		t.Fatal(err)
	}
	_, table, ok := strings.Cut(string(text), "## Comments and help")
	if !ok {
		t.Fatalf("%s has no words of comments", glossary)
	}
	var all []phrase
	for line := range strings.Lines(table) {
		cells := strings.Split(strings.TrimSpace(line), "|")
		if len(cells) != 5 || strings.HasPrefix(cells[1], "--") || strings.TrimSpace(cells[1]) == "not" {
			continue
		}
		where := strings.TrimSpace(cells[2])
		if where != "anywhere" && where != "after the name" {
			t.Fatalf("%s: a phrase is not used %q, which is neither anywhere nor after the name", glossary, where)
		}
		for one := range strings.SplitSeq(cells[1], ",") {
			one = strings.TrimSpace(one)
			all = append(all, phrase{
				text: one, write: strings.TrimSpace(cells[3]), verb: where == "after the name",
				find: finds(one),
			})
		}
	}
	if len(all) == 0 {
		t.Fatalf("%s lists no phrase", glossary)
	}
	return all
}

// finds returns the pattern of a phrase, which may begin a sentence and may be broken by the end of a line. It does not
// match a phrase inside a longer word, or in another spelling such as http.NoBody.
func finds(text string) *regexp.Regexp {
	first, rest := regexp.QuoteMeta(text[:1]), strings.ReplaceAll(regexp.QuoteMeta(text[1:]), " ", `\s+`)
	return regexp.MustCompile(`\b(?:` + first + "|" + strings.ToUpper(first) + ")" + rest + `\b`)
}

// misworded returns the first phrase of a text that is used nowhere, or "".
func misworded(phrases []phrase, text string) string {
	for _, p := range phrases {
		if !p.verb && p.find.MatchString(text) {
			return "write " + strconv.Quote(p.write) + " in place of " + strconv.Quote(p.text) + " (" + glossary + ")"
		}
	}
	return ""
}

// begins returns what follows the name with which a doc comment begins, and false if it begins otherwise. As in the
// standard library, an article may stand before the name, and what is deprecated may say so first.
func begins(doc, name string) (rest string, ok bool) {
	doc = strings.TrimSpace(doc)
	for _, article := range []string{"A ", "An ", "The "} {
		doc = strings.TrimPrefix(doc, article)
	}
	rest, ok = strings.CutPrefix(doc, name)
	if !ok || strings.HasPrefix(doc, "Deprecated:") {
		return "", strings.HasPrefix(doc, "Deprecated:")
	}
	// The name ends here: "Runs" is no comment of Run.
	return rest, rest == "" || !isNameByte(rest[0])
}

func isNameByte(b byte) bool {
	return b == '_' || b >= '0' && b <= '9' || b >= 'A' && b <= 'Z' || b >= 'a' && b <= 'z'
}

// documented calls note with each declaration of the top level that has a doc comment of its own. Of a group of
// constants or variables that share one comment, each may be named by it, or none.
func documented(f *ast.File, note func(name string, doc *ast.CommentGroup, function bool)) {
	for _, decl := range f.Decls {
		switch d := decl.(type) {
		case *ast.FuncDecl:
			if d.Doc != nil {
				note(d.Name.Name, d.Doc, true)
			}
		case *ast.GenDecl:
			for _, spec := range d.Specs {
				switch s := spec.(type) {
				case *ast.TypeSpec:
					doc := s.Doc
					if doc == nil && len(d.Specs) == 1 {
						doc = d.Doc
					}
					if doc != nil {
						note(s.Name.Name, doc, false)
					}
				case *ast.ValueSpec:
					if d.Lparen == token.NoPos && d.Doc != nil && len(s.Names) == 1 {
						note(s.Names[0].Name, d.Doc, false)
					}
				}
			}
		}
	}
}

// wrongDoc returns what is wrong with the beginning of a doc comment, or "".
func wrongDoc(phrases []phrase, name, doc string, function bool) string {
	rest, ok := begins(doc, name)
	if !ok {
		return "the comment of " + name + " does not begin with the name"
	}
	if !function {
		return ""
	}
	for _, p := range phrases {
		if at := p.find.FindStringIndex(strings.TrimSpace(rest)); p.verb && at != nil && at[0] == 0 {
			return "the comment of " + name + ": write " + strconv.Quote(p.write) + " in place of " + strconv.Quote(p.text) +
				" (" + glossary + ")"
		}
	}
	return ""
}

// TestCommentsHaveTheWordsOfTheGlossary checks the phrases that are used nowhere in all comments, those of tests
// included, and the beginnings of doc comments in code that is no test.
func TestCommentsHaveTheWordsOfTheGlossary(t *testing.T) {
	phrases, tr := unusedPhrases(t), load(t)
	for _, p := range tr.pkgs {
		for _, f := range p.files {
			if f.generated {
				continue
			}
			for _, group := range f.ast.Comments {
				if wrong := misworded(phrases, group.Text()); wrong != "" {
					t.Errorf("%s: %s", tr.fset.Position(group.Pos()), wrong)
				}
			}
			if f.test {
				continue
			}
			documented(f.ast, func(name string, doc *ast.CommentGroup, function bool) {
				if doc.Text() == "" { // directives alone
					return
				}
				if wrong := wrongDoc(phrases, name, doc.Text(), function); wrong != "" {
					t.Errorf("%s: %s", tr.fset.Position(doc.Pos()), wrong)
				}
			})
		}
	}
}

// TestPagesHaveTheWordsOfTheGlossary checks the phrases that are used nowhere in the documentation. The glossary itself
// lists them.
func TestPagesHaveTheWordsOfTheGlossary(t *testing.T) {
	phrases, top, seen := unusedPhrases(t), root(t), 0
	walk(t, func(rel string) {
		if !strings.HasSuffix(rel, ".md") || rel == glossary {
			return
		}
		content, err := os.ReadFile(filepath.Join(top, filepath.FromSlash(rel)))
		if err != nil {
			t.Fatal(err)
		}
		seen++
		for paragraph := range strings.SplitSeq(string(content), "\n\n") {
			if wrong := misworded(phrases, paragraph); wrong != "" {
				t.Errorf("%s: %s: %s", rel, wrong, strings.TrimSpace(paragraph))
			}
		}
	})
	if seen == 0 {
		t.Error("no page was found")
	}
}

// flagMethods are the methods of a set of flags that declare one, with the place of the name and of the text of help.
var flagMethods = regexp.MustCompile(
	`^(?:Bool|Count|Duration|Float64|Int|Int32|Int64|IntSlice|IP|String|StringArray|StringSlice|StringToString|Uint|` +
		`Uint32|Uint64|Func|TextVar|BoolFunc|Var)(?:Var)?P?F?$`)

// helpFields are the fields of literals that people read as help: of metrics and commands.
var helpFields = []string{"Help", "Short", "Long"}

// texts calls name with each name that a program shows (of tasks, metrics, flags and columns) and with the help of
// metrics, and help with each text that explains something.
func texts(f *ast.File, name, help func(text string, at token.Pos)) {
	value := func(e ast.Expr, note func(string, token.Pos)) {
		ast.Inspect(e, func(n ast.Node) bool {
			lit, ok := n.(*ast.BasicLit)
			if !ok || lit.Kind != token.STRING {
				return true
			}
			if text, err := strconv.Unquote(lit.Value); err == nil {
				note(text, lit.Pos())
			}
			return true
		})
	}
	ast.Inspect(f, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.KeyValueExpr:
			key, ok := n.Key.(*ast.Ident)
			if !ok {
				return true
			}
			if _, literal := n.Value.(*ast.FuncLit); literal {
				return true
			}
			if key.Name == "Name" {
				if lit, ok := n.Value.(*ast.BasicLit); ok {
					value(lit, name)
				}
			}
			if slices.Contains(helpFields, key.Name) {
				value(n.Value, help)
			}
			if key.Name == "Help" {
				value(n.Value, name)
			}
		case *ast.CallExpr:
			called, ok := n.Fun.(*ast.SelectorExpr)
			if !ok || len(n.Args) < 3 || !flagMethods.MatchString(called.Sel.Name) {
				return true
			}
			for _, arg := range n.Args[:2] {
				if lit, ok := arg.(*ast.BasicLit); ok {
					value(lit, func(text string, at token.Pos) { name("--"+text, at) })
					break
				}
			}
			value(n.Args[len(n.Args)-1], help)
		case *ast.Field:
			if n.Tag != nil {
				if tag, ok := dbTag(n.Tag.Value); ok {
					name(tag, n.Tag.Pos())
				}
			}
		}
		return true
	})
}

var dbTags = regexp.MustCompile(`db:"([^"]*)"`)

// dbTag returns the name of a column in the tag of a field.
func dbTag(tag string) (string, bool) {
	found := dbTags.FindStringSubmatch(tag)
	if found == nil {
		return "", false
	}
	return found[1], true
}

// TestShownNamesAndHelpHaveTheWordsOfTheGlossary: names of tasks, metrics, flags and columns, and the texts of help.
func TestShownNamesAndHelpHaveTheWordsOfTheGlossary(t *testing.T) {
	words, phrases, tr := unusedWords(t), unusedPhrases(t), load(t)
	for _, p := range tr.pkgs {
		for _, f := range p.files {
			if f.generated || f.test {
				continue
			}
			texts(f.ast, func(text string, at token.Pos) {
				if wrong := misnamed(words, f.path, text); wrong != "" {
					t.Errorf("%s: %s", tr.fset.Position(at), wrong)
				}
			}, func(text string, at token.Pos) {
				if wrong := misworded(phrases, text); wrong != "" {
					t.Errorf("%s: %s", tr.fset.Position(at), wrong)
				}
			})
		}
	}
}

func TestWrongDoc(t *testing.T) {
	phrases := []phrase{
		{text: "answers", write: "returns", verb: true, find: finds("answers")},
		{text: "nobody", write: "no caller", find: finds("nobody")},
	}
	for doc, right := range map[string]bool{
		"Open returns a file.":                       true,
		"The Open returns a file.":                   true,
		"Open: it returns a file.":                   true,
		"Opens a file.":                              false,
		"It opens a file.":                           false,
		"Open answers with a file.":                  false,
		"Open returns a file that answers.":          true,
		"Deprecated: use Read.":                      true,
		"openFile returns a file, as Open does not.": false,
	} {
		if wrong := wrongDoc(phrases, "Open", doc, true); (wrong == "") != right {
			t.Errorf("%q: %q", doc, wrong)
		}
	}
	if misworded(phrases, "What nobody opens.") == "" {
		t.Error("a word that is used nowhere is not found")
	}
	if wrong := misworded(phrases, "An http.NoBody answers."); wrong != "" {
		t.Error(wrong)
	}
}
