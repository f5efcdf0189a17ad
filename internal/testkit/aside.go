package testkit

import (
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"github.com/gpuaas/mesh/internal/aside"
)

// SetAside returns a function that returns how many rows a reader has set aside since the call.
func SetAside(tb testing.TB, reader string) func() int {
	tb.Helper()
	count := func() int {
		tb.Helper()
		registry := prometheus.NewRegistry()
		if err := registry.Register(aside.Collector()); err != nil {
			tb.Fatal(err)
		}
		families, err := registry.Gather()
		if err != nil {
			tb.Fatal(err)
		}
		var n float64
		for _, family := range families {
			for _, m := range family.GetMetric() {
				if labelled(m, reader) {
					n += m.GetCounter().GetValue()
				}
			}
		}
		return int(n)
	}
	before := count()
	return func() int { tb.Helper(); return count() - before }
}

// labelled reports whether the only label of a metric has the value.
func labelled(m *dto.Metric, value string) bool {
	return len(m.GetLabel()) == 1 && m.GetLabel()[0].GetValue() == value
}
