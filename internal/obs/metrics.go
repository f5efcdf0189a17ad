package obs

import (
	"fmt"
	"net/http"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/aside"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
)

// MetricPrefix starts the name of every metric of ours.
const MetricPrefix = "gpuaas_"

// Registry collects the metrics of a process. It is a prometheus.Registerer that prefixes names with gpuaas_.
type Registry struct {
	prometheus.Registerer

	inner *prometheus.Registry
}

// NewRegistry returns a registry with the Go runtime's, the process's and the build's metrics.
func NewRegistry() (*Registry, error) {
	inner := prometheus.NewRegistry()
	r := &Registry{Registerer: prometheus.WrapRegistererWithPrefix(MetricPrefix, inner), inner: inner}
	for _, c := range []prometheus.Collector{
		collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
	} {
		if err := inner.Register(c); err != nil {
			return nil, fmt.Errorf("register runtime metrics: %w", err)
		}
	}
	version, revision := Build()
	info := prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "build_info", Help: "Always 1; its labels say what was built from which revision by which Go.",
		ConstLabels: prometheus.Labels{"version": version, "revision": revision, "go_version": runtime.Version()},
	})
	info.Set(1)
	if err := r.Register(info); err != nil {
		return nil, fmt.Errorf("register build info: %w", err)
	}
	if err := r.Register(aside.Collector()); err != nil {
		return nil, fmt.Errorf("register count of rows set aside: %w", err)
	}
	return r, nil
}

// ForService returns a registerer whose metrics carry the label service, so that several services of one process share
// one registry.
func (r *Registry) ForService(name string) prometheus.Registerer {
	return prometheus.WrapRegistererWith(prometheus.Labels{KeyService: name}, r)
}

// Gatherer returns the gatherer of the metrics that Handler serves.
func (r *Registry) Gatherer() prometheus.Gatherer { return r.inner }

// Handler serves the metrics.
func (r *Registry) Handler() http.Handler {
	return promhttp.HandlerFor(r.inner, promhttp.HandlerOpts{EnableOpenMetrics: true})
}

// stamped is the version that the linker wrote: -X github.com/gpuaas/mesh/internal/obs.stamped=v1.2.3. Empty in a build
// without a version.
var stamped string

// Build returns the version and the revision that the running binary was built from.
func Build() (string, string) {
	version, revision := "dev", "unknown"
	info, ok := debug.ReadBuildInfo()
	if ok && info.Main.Version != "" && info.Main.Version != "(devel)" {
		version = info.Main.Version
	}
	if stamped != "" {
		version = stamped
	}
	if !ok {
		return version, revision
	}
	for _, s := range info.Settings {
		if s.Key == "vcs.revision" {
			revision = s.Value
		}
	}
	return version, revision
}

// ReasonLabel returns a reason as a metric label: its spelling if the enum declares it, and `other` for anything else,
// so that a peer cannot add series.
func ReasonLabel(reason commonv1.Reason) string {
	if !fault.Known(reason) {
		return "other"
	}
	return names.Of(reason)
}

// ForbiddenLabel reports whether a label name is one that would hold an id, an address or a person's text, whose number
// has no bound.
func ForbiddenLabel(name string) bool {
	if slices.Contains([]string{
		"id", "uuid", "node", "node_name", "workspace", "workspace_name", "tenant", "tenant_name", "task", "serial",
		"hostname", "address", "addr", "ip", "remote", "path", "url", "error", "message", "user", "email", "subject",
	}, name) {
		return true
	}
	return strings.HasSuffix(name, "_id") || strings.HasSuffix(name, "_uuid")
}
