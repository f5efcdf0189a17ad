// Package obstest checks metrics in tests: their names by promlint's rules, their labels by ours. It is imported by
// tests only.
package obstest

import (
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	dto "github.com/prometheus/client_model/go"

	"github.com/gpuaas/mesh/internal/obs"
)

// Problems returns the problems of our metrics among those gathered; metrics of the Go runtime and the process are not
// checked.
func Problems(g prometheus.Gatherer) ([]string, error) {
	families, err := g.Gather()
	if err != nil {
		return nil, err
	}
	var ours []*dto.MetricFamily
	var out []string
	for _, f := range families {
		name := f.GetName()
		if strings.HasPrefix(name, "go_") || strings.HasPrefix(name, "process_") || strings.HasPrefix(name, "promhttp_") {
			continue
		}
		ours = append(ours, f)
		if !strings.HasPrefix(name, obs.MetricPrefix) {
			out = append(out, name+": does not start with "+obs.MetricPrefix)
		}
		seen := map[string]bool{}
		for _, m := range f.GetMetric() {
			for _, l := range m.GetLabel() {
				if obs.ForbiddenLabel(l.GetName()) && !seen[l.GetName()] {
					seen[l.GetName()] = true
					out = append(out, name+": label "+l.GetName()+" has no end of values")
				}
			}
		}
	}
	linted, err := promlint.NewWithMetricFamilies(ours).Lint()
	if err != nil {
		return nil, err
	}
	for _, p := range linted {
		out = append(out, p.Metric+": "+p.Text)
	}
	return out, nil
}

// Lint fails the test for each problem. A vector exposes its labels only once it has a value, so set a value of each
// before.
func Lint(t *testing.T, g prometheus.Gatherer) {
	t.Helper()
	problems, err := Problems(g)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		t.Error(p)
	}
}
