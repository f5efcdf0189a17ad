package archtest

import (
	"go/ast"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// chains is the page that lists, function by function, how a task, an enrolment, a cancel and a fence go through the
// code.
const chains = "docs/chains.md"

var (
	chainHead = regexp.MustCompile("^## ([A-Za-z ]+): ([0-9]+) functions")
	chainHop  = regexp.MustCompile("^([0-9]+)\\. `([a-z/-]+)\\.([A-Za-z.]+)`")
)

// functions are the names of all functions and methods of a package, as Name and Type.Name.
func functions(p *pkg) []string {
	var names []string
	for _, f := range p.files {
		for _, d := range f.ast.Decls {
			switch d := d.(type) {
			case *ast.FuncDecl:
				names = append(names, receiver(d)+d.Name.Name)
			case *ast.GenDecl:
				for _, spec := range d.Specs {
					names = append(names, methods(spec)...)
				}
			}
		}
	}
	return names
}

// receiver returns the name of a method's type and a dot, and "" for a function.
func receiver(d *ast.FuncDecl) string {
	if d.Recv == nil || len(d.Recv.List) != 1 {
		return ""
	}
	of := d.Recv.List[0].Type
	if star, ok := of.(*ast.StarExpr); ok {
		of = star.X
	}
	switch generic := of.(type) {
	case *ast.IndexExpr:
		of = generic.X
	case *ast.IndexListExpr:
		of = generic.X
	}
	if id, ok := of.(*ast.Ident); ok {
		return id.Name + "."
	}
	return ""
}

// methods returns those of an interface type, as Type.Name.
func methods(spec ast.Spec) []string {
	t, ok := spec.(*ast.TypeSpec)
	if !ok {
		return nil
	}
	list, ok := t.Type.(*ast.InterfaceType)
	if !ok {
		return nil
	}
	var names []string
	for _, m := range list.Methods.List {
		for _, id := range m.Names {
			names = append(names, t.Name.Name+"."+id.Name)
		}
	}
	return names
}

// TestChainsNameFunctions holds each chain to its number of hops, and each hop to a function that there is.
func TestChainsNameFunctions(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(root(t), filepath.FromSlash(chains)))
	if err != nil {
		t.Fatal(err)
	}
	tr := load(t)
	known := map[string][]string{}
	chain, said, hops, seen := "", 0, 0, 0
	end := func() {
		if chain != "" && hops != said {
			t.Errorf("%s: %s has %d functions, the heading says %d", chains, chain, hops, said)
		}
	}
	for line := range strings.Lines(string(text)) {
		if head := chainHead.FindStringSubmatch(line); head != nil {
			end()
			chain, hops = head[1], 0
			said, _ = strconv.Atoi(head[2]) // the pattern has digits alone
			seen++
			continue
		}
		hop := chainHop.FindStringSubmatch(line)
		if hop == nil {
			continue
		}
		hops++
		if hop[1] != strconv.Itoa(hops) {
			t.Errorf("%s: %s: hop %d has the number %s", chains, chain, hops, hop[1])
		}
		if known[hop[2]] == nil {
			var dirs []string
			for dir, p := range tr.pkgs {
				if dir == hop[2] || strings.HasSuffix(dir, "/"+hop[2]) {
					dirs = append(dirs, dir)
					known[hop[2]] = functions(p)
				}
			}
			if len(dirs) != 1 {
				t.Errorf("%s: %s: hop %d: %d packages have the path %s: %q", chains, chain, hops, len(dirs), hop[2], dirs)
			}
		}
		if !slices.Contains(known[hop[2]], hop[3]) {
			t.Errorf("%s: %s: hop %d: package %s has no function %s", chains, chain, hops, hop[2], hop[3])
		}
	}
	end()
	if seen != 4 {
		t.Errorf("%s has %d chains, want those of a task, an enrolment, a cancel and a fence", chains, seen)
	}
}
