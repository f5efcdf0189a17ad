package archtest

import (
	"bytes"
	"go/ast"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/obs"
)

// alertRule is a rule of Prometheus.
type alertRule struct {
	Alert       string            `yaml:"alert"`
	Expr        string            `yaml:"expr"`
	For         string            `yaml:"for"`
	Labels      map[string]string `yaml:"labels"`
	Annotations map[string]string `yaml:"annotations"`
}

// alertRules returns the rules of deploy/alerts. A field that Prometheus does not know fails the test.
func alertRules(t *testing.T) []alertRule {
	t.Helper()
	content, err := os.ReadFile(filepath.Join(root(t), "deploy", "alerts", "gpuaas.rules.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	var file struct {
		Groups []struct {
			Name  string      `yaml:"name"`
			Rules []alertRule `yaml:"rules"`
		} `yaml:"groups"`
	}
	d := yaml.NewDecoder(bytes.NewReader(content))
	d.KnownFields(true)
	if err := d.Decode(&file); err != nil {
		t.Fatal(err)
	}
	var out []alertRule
	for _, g := range file.Groups {
		out = append(out, g.Rules...)
	}
	return out
}

var (
	ofKind       = regexp.MustCompile(`\{kind="([a-z_]+)"\}`)
	metricOfRule = regexp.MustCompile(obs.MetricPrefix + `([a-z_]+)(?:\{([^}]*)\})?`)
	matcher      = regexp.MustCompile(`^([a-z_]+)(?:=|!=|=~|!~)"([^"]*)"$`)
	grouping     = regexp.MustCompile(`\b(?:by|without) \(([^)]*)\)`)
)

// TestEveryPageHasItsRule: each kind of incident has a severity; each that is paged has exactly one rule that pages its
// audience, with the page of the runbook, and no other kind has one.
func TestEveryPageHasItsRule(t *testing.T) {
	of := map[string][]alertRule{}
	seen := map[string]bool{}
	for _, r := range alertRules(t) {
		if r.Alert == "" || seen[r.Alert] {
			t.Errorf("the name %q is empty or taken", r.Alert)
		}
		seen[r.Alert] = true
		if r.Annotations["summary"] == "" || r.Annotations["description"] == "" {
			t.Errorf("%s has no summary or no description", r.Alert)
		}
		if s := r.Labels["severity"]; s != "page" && s != "ticket" {
			t.Errorf("%s has the severity %q", r.Alert, s)
		}
		if page := r.Annotations["runbook"]; page != "" && !strings.Contains(page, "{{") {
			if _, err := os.Stat(filepath.Join(root(t), page)); err != nil {
				t.Errorf("%s: %v", r.Alert, err)
			}
		}
		for _, kind := range ofKind.FindAllStringSubmatch(r.Expr, -1) {
			of[kind[1]] = append(of[kind[1]], r)
		}
	}
	for _, kind := range names.All[commonv1.IncidentKind]() {
		name, alert := names.Of(kind), fault.AlertOf(kind)
		if alert.Severity == 0 || alert.Audience == "" {
			t.Errorf("%s has no severity or no audience: %+v", name, alert)
		}
		rules := of[name]
		delete(of, name)
		if !alert.Pages {
			if len(rules) > 0 {
				t.Errorf("%s is not paged, and %s selects it", name, rules[0].Alert)
			}
			continue
		}
		if len(rules) != 1 {
			t.Errorf("%s is paged by %d rules, want 1", name, len(rules))
			continue
		}
		r := rules[0]
		if r.For != "" || r.Labels["severity"] != "page" || r.Labels["audience"] != alert.Audience ||
			r.Annotations["runbook"] != fault.Runbook(name) {
			t.Errorf("%s of %s waits %q, has the labels %v and the runbook %q; want no wait, a page for %s, and %s", r.Alert,
				name, r.For, r.Labels, r.Annotations["runbook"], alert.Audience, fault.Runbook(name))
		}
	}
	for kind := range of {
		t.Errorf("%q is no kind of incident", kind)
	}
}

// TestRulesNameMetricsThatExist: each metric of an alert is registered by a program, with the labels that the rule
// selects or groups by, and each value that it selects is one that the label can have.
func TestRulesNameMetricsThatExist(t *testing.T) {
	metrics := metricsOf(load(t))
	values := map[string][]string{
		"kind": names.Spellings[commonv1.IncidentKind](), "severity": names.Spellings[commonv1.Severity](),
		"reason": names.Spellings[commonv1.DriftReason](),
	}
	for _, r := range alertRules(t) {
		selected := metricOfRule.FindAllStringSubmatch(r.Expr, -1)
		if len(selected) == 0 {
			t.Errorf("%s reads no metric of ours: %s", r.Alert, r.Expr)
		}
		if strings.Count(r.Expr, "(") != strings.Count(r.Expr, ")") {
			t.Errorf("%s: parentheses do not match: %s", r.Alert, r.Expr)
		}
		var known []string // the labels of the rule's metrics
		for _, s := range selected {
			labels, ok := metrics[s[1]]
			if !ok {
				t.Errorf("%s: no program has a metric %s", r.Alert, s[1])
			}
			known = append(known, labels...)
			for _, m := range strings.FieldsFunc(s[2], func(c rune) bool { return c == ',' }) {
				parts := matcher.FindStringSubmatch(strings.TrimSpace(m))
				if parts == nil || !slices.Contains(labels, parts[1]) || !slices.Contains(values[parts[1]], parts[2]) {
					t.Errorf("%s: %s has no series with %s", r.Alert, s[1], m)
				}
			}
		}
		for _, g := range grouping.FindAllStringSubmatch(r.Expr, -1) {
			for label := range strings.SplitSeq(g[1], ",") {
				if !slices.Contains(known, strings.TrimSpace(label)) {
					t.Errorf("%s groups by %s, which none of its metrics has", r.Alert, label)
				}
			}
		}
	}
}

// metricsOf returns the labels of the metrics that the programs register, by their names without the prefix.
func metricsOf(tr *tree) map[string][]string {
	out := map[string][]string{}
	for _, p := range tr.pkgs {
		for _, f := range p.files {
			if f.test || f.generated {
				continue
			}
			ast.Inspect(f.ast, func(n ast.Node) bool {
				call, ok := n.(*ast.CallExpr)
				if !ok || len(call.Args) == 0 {
					return true
				}
				if fun, ok := call.Fun.(*ast.SelectorExpr); !ok || !isIdent(fun.X, "prometheus") {
					return true
				}
				if name := nameOfOpts(call.Args[0]); name != "" {
					out[name] = nil
					if len(call.Args) > 1 {
						out[name] = stringsOf(call.Args[1])
					}
				}
				return true
			})
		}
	}
	return out
}

func isIdent(e ast.Expr, name string) bool {
	id, ok := e.(*ast.Ident)
	return ok && id.Name == name
}

// nameOfOpts returns the field Name of the options of a metric.
func nameOfOpts(e ast.Expr) string {
	opts, ok := e.(*ast.CompositeLit)
	if !ok {
		return ""
	}
	for _, field := range opts.Elts {
		if kv, ok := field.(*ast.KeyValueExpr); ok && isIdent(kv.Key, "Name") {
			return text(kv.Value)
		}
	}
	return ""
}

// stringsOf returns the literals of a list.
func stringsOf(e ast.Expr) []string {
	list, ok := e.(*ast.CompositeLit)
	if !ok {
		return nil
	}
	var out []string
	for _, elt := range list.Elts {
		if s := text(elt); s != "" {
			out = append(out, s)
		}
	}
	return out
}

// text returns the value of a literal; empty if it is none.
func text(e ast.Expr) string {
	lit, ok := e.(*ast.BasicLit)
	if !ok || lit.Kind != token.STRING {
		return ""
	}
	s, err := strconv.Unquote(lit.Value)
	if err != nil {
		return ""
	}
	return s
}
