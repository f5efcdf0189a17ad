package archtest

import (
	"go/ast"
	"go/token"
	"regexp"
	"strconv"
	"testing"

	"github.com/gpuaas/mesh/internal/fault"
)

// codeOfRun is how a run's reason begins: with a code, in Go or within a statement.
var codeOfRun = regexp.MustCompile(`(?:^|')([a-z]+_[a-z_]+): `)

// TestReasonsOfRunsAreExplained: each code that package saga writes at the beginning of a run's reason can be
// explained.
func TestReasonsOfRunsAreExplained(t *testing.T) {
	tr := load(t)
	found := map[string]bool{}
	for _, p := range tr.pkgs {
		if !under(p.dir, "services/lifecycle/saga") {
			continue
		}
		for _, f := range p.files {
			if f.test {
				continue
			}
			ast.Inspect(f.ast, func(n ast.Node) bool {
				text, ok := n.(*ast.BasicLit)
				if !ok || text.Kind != token.STRING {
					return true
				}
				value, err := strconv.Unquote(text.Value)
				if err != nil {
					return true
				}
				for _, match := range codeOfRun.FindAllStringSubmatch(value, -1) {
					found[match[1]] = true
					if len(fault.Explanations(match[1])) != 1 {
						t.Errorf("%s: %s cannot be explained", tr.fset.Position(text.Pos()), match[1])
					}
				}
				return true
			})
		}
	}
	if len(found) < 4 {
		t.Errorf("only the codes %v are found", found)
	}
}
