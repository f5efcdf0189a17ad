package archtest

import (
	"go/ast"
	"go/token"
	"path"
	"strings"
	"testing"
)

// unregistered are the directories whose statements are not registered, with the reason.
var unregistered = map[string]string{
	"internal/pg":        "it defines the registry",
	"internal/pg/schema": "it makes the roles that the registry names, and the tables that statements need",
	"devstack/pgserver":  "it runs a server of its own, before there are roles",
	"internal/testkit":   "it prepares databases of tests",
	"bench/peers":        "it is a module of its own, and makes the databases of other engines",
	"bench/lives":        "it compacts all tables: VACUUM cannot be prepared",
	"mesh/plans":         "it plans the statements of others, and copies the rows of tables that it finds",
}

// statementsTest imports every package that defines statements.
const statementsTest = "mesh/statements"

// TestStatementsAreRegistered: SQL reaches the database through the functions of package pg that take a registered
// statement, so that each one is prepared by a test, as its role.
func TestStatementsAreRegistered(t *testing.T) {
	tr := load(t)
	for _, p := range tr.pkgs {
		if unregistered[p.dir] != "" {
			continue
		}
		for _, f := range p.files {
			if f.test {
				continue
			}
			ast.Inspect(f.ast, func(n ast.Node) bool {
				call, ok := n.(*ast.CallExpr)
				if !ok || !runsText(call) {
					return true
				}
				t.Errorf("%s runs SQL that is not registered: see docs/sql.md", tr.fset.Position(call.Pos()))
				return true
			})
		}
	}
}

// runsText reports whether a call runs SQL that is given as text: Query, QueryRow or Exec of anything but package pg,
// with a context and more; or Queue of a batch.
func runsText(call *ast.CallExpr) bool {
	sel, ok := call.Fun.(*ast.SelectorExpr)
	if !ok {
		return false
	}
	of, _ := sel.X.(*ast.Ident)
	if of != nil && of.Name == "pg" {
		return false
	}
	switch sel.Sel.Name {
	case "Query", "QueryRow", "Exec":
		return len(call.Args) >= 2 && isContext(call.Args[0])
	case "SendBatch":
		return true
	}
	return false
}

// isContext reports whether an argument looks like a context: a variable named for it, or a call of package context or
// of a test.
func isContext(arg ast.Expr) bool {
	switch x := arg.(type) {
	case *ast.Ident:
		return x.Name == "ctx" || strings.HasSuffix(strings.ToLower(x.Name), "ctx") || x.Name == "stmt"
	case *ast.SelectorExpr:
		return strings.HasSuffix(strings.ToLower(x.Sel.Name), "ctx")
	case *ast.CallExpr:
		sel, ok := x.Fun.(*ast.SelectorExpr)
		return ok && (sel.Sel.Name == "Context" || sel.Sel.Name == "Background" || sel.Sel.Name == "WithoutCancel")
	}
	return false
}

// TestStatementsAreDefinedAtStart: a statement that is defined later is missing when all statements are prepared, and a
// second call would panic.
func TestStatementsAreDefinedAtStart(t *testing.T) {
	tr := load(t)
	imported := map[string]bool{}
	for _, f := range tr.pkgs[statementsTest].files {
		for _, name := range f.imports {
			imported[dirOf(name)] = true
		}
	}
	for _, p := range tr.pkgs {
		defines := false
		for _, f := range p.files {
			if f.test || unregistered[p.dir] != "" {
				continue
			}
			atStart := map[token.Pos]bool{}
			for _, decl := range f.ast.Decls {
				vars, ok := decl.(*ast.GenDecl)
				if !ok || vars.Tok != token.VAR {
					continue
				}
				ast.Inspect(vars, func(n ast.Node) bool {
					if _, inFunc := n.(*ast.FuncLit); inFunc {
						return false
					}
					if call, ok := n.(*ast.CallExpr); ok {
						atStart[call.Pos()] = true
					}
					return true
				})
			}
			ast.Inspect(f.ast, func(n ast.Node) bool {
				call, ok := n.(*ast.CallExpr)
				if !ok || !definesStatement(call) {
					return true
				}
				defines = true
				if !atStart[call.Pos()] {
					t.Errorf("%s defines a statement outside of a declaration of the package", tr.fset.Position(call.Pos()))
				}
				return true
			})
		}
		if defines && !imported[p.dir] {
			t.Errorf("%s defines statements, and %s does not import it", p.dir, path.Join(statementsTest, "statements_test.go"))
		}
	}
}

func definesStatement(call *ast.CallExpr) bool {
	fun := call.Fun
	switch x := fun.(type) { // of a generic function
	case *ast.IndexExpr:
		fun = x.X
	case *ast.IndexListExpr:
		fun = x.X
	}
	sel, ok := fun.(*ast.SelectorExpr)
	if !ok {
		return false
	}
	of, ok := sel.X.(*ast.Ident)
	return ok && of.Name == "pg" && strings.HasPrefix(sel.Sel.Name, "Define")
}

// byPosition has the files that may read columns by their position, with the reason.
var byPosition = map[string]string{
	"internal/events/sequencer.go": "the statement that takes the lock sets the planner in further columns, without names",
}

// TestColumnsAreReadByName: no code scans several columns by their position, where two of one type may be exchanged
// unnoticed. pg.One and pg.All read them into a struct by `db` tags.
func TestColumnsAreReadByName(t *testing.T) {
	tr, used := load(t), map[string]bool{}
	for _, p := range tr.pkgs {
		for _, f := range p.files {
			if f.test || f.generated || under(p.dir, "internal/testkit") {
				continue
			}
			ast.Inspect(f.ast, func(n ast.Node) bool {
				call, ok := n.(*ast.CallExpr)
				if !ok || len(call.Args) < 2 {
					return true
				}
				if name, ok := call.Fun.(*ast.SelectorExpr); !ok || name.Sel.Name != "Scan" {
					return true
				}
				if into, ok := call.Args[0].(*ast.UnaryExpr); !ok || into.Op != token.AND {
					return true
				}
				used[f.path] = true
				if byPosition[f.path] == "" {
					t.Errorf("%s: several columns are scanned by position: use pg.One with `db` tags", tr.fset.Position(call.Pos()))
				}
				return true
			})
		}
	}
	for path := range byPosition {
		if !used[path] {
			t.Errorf("%s scans nothing by position: take it from the list", path)
		}
	}
}
