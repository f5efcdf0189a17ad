package archtest

import (
	"go/ast"
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
				if _, same := call.Args[1].(*ast.BasicLit); same {
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
