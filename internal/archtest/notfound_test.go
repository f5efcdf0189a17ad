package archtest

import (
	"go/ast"
	"go/parser"
	"go/token"
	"slices"
	"testing"
)

// TestNotFoundNamesWhatWasAskedFor: no service refuses a request as not_found with a text that is the same for each
// request. fault.NoSuch names the object; a text of its own has fault.Named or a number in it.
func TestNotFoundNamesWhatWasAskedFor(t *testing.T) {
	tr, found := load(t), 0
	for _, p := range tr.pkgs {
		if !under(p.dir, "services") {
			continue
		}
		constants := map[string]bool{}
		for _, f := range p.files {
			addConstants(constants, f.ast)
		}
		for _, f := range p.files {
			if f.test {
				continue
			}
			ast.Inspect(f.ast, func(n ast.Node) bool {
				call, ok := n.(*ast.CallExpr)
				if !ok || len(call.Args) < 2 {
					return true
				}
				name, ok := call.Fun.(*ast.SelectorExpr)
				if !ok {
					return true
				}
				if name.Sel.Name == "NoSuch" {
					found++
				}
				reason, ok := call.Args[0].(*ast.SelectorExpr)
				if !ok || name.Sel.Name != "New" || reason.Sel.Name != "REASON_NOT_FOUND" {
					return true
				}
				if sameText(call.Args[1], constants) {
					t.Errorf("%s: the refusal does not name what was asked for: use fault.NoSuch", tr.fset.Position(call.Pos()))
				}
				return true
			})
		}
	}
	if found < 10 {
		t.Errorf("only %d refusals by NoSuch are found", found)
	}
}

// addConstants adds the names of the constants that a file declares, at its top or in a function.
func addConstants(names map[string]bool, file *ast.File) {
	ast.Inspect(file, func(n ast.Node) bool {
		decl, ok := n.(*ast.GenDecl)
		if !ok || decl.Tok != token.CONST {
			return true
		}
		for _, spec := range decl.Specs {
			if values, ok := spec.(*ast.ValueSpec); ok {
				for _, name := range values.Names {
					names[name.Name] = true
				}
			}
		}
		return true
	})
}

// sameText reports whether an expression is a text that does not depend on the request: a literal, a constant of the
// package, and what fmt.Sprintf and + make of these alone.
func sameText(e ast.Expr, constants map[string]bool) bool {
	same := func(e ast.Expr) bool { return sameText(e, constants) }
	switch e := e.(type) {
	case *ast.BasicLit:
		return true
	case *ast.Ident:
		return constants[e.Name]
	case *ast.ParenExpr:
		return same(e.X)
	case *ast.BinaryExpr:
		return same(e.X) && same(e.Y)
	case *ast.CallExpr:
		name, ok := e.Fun.(*ast.SelectorExpr)
		return ok && name.Sel.Name == "Sprintf" && !slices.ContainsFunc(e.Args, func(e ast.Expr) bool { return !same(e) })
	}
	return false
}

func TestSameTextIsFound(t *testing.T) {
	constants := map[string]bool{}
	file, err := parser.ParseFile(token.NewFileSet(), "x.go", "package x\nconst gone = \"gone\"\n"+
		"func f() { const most = 3 }", 0)
	if err != nil {
		t.Fatal(err)
	}
	addConstants(constants, file)
	for text, want := range map[string]bool{
		`"it is not there"`: true, `gone`: true, `("it is " + gone)`: true, `fmt.Sprintf("it is not there")`: true,
		`fmt.Sprintf("it is %s of %d", gone, most)`: true,
		`fmt.Sprintf("there is no %q", name)`:       false, `"it is " + name`: false, `name`: false,
		`textOf("it")`: false, `fmt.Sprintf("%s: "+gone, req.GetName())`: false,
	} {
		e, err := parser.ParseExpr(text)
		if err != nil {
			t.Fatal(err)
		}
		if got := sameText(e, constants); got != want {
			t.Errorf("%s: the same for each request: %t, want %t", text, got, want)
		}
	}
}
