package guard

import (
	"errors"
	"fmt"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pki"
)

// Metrics of a server. Procedures are those that are mounted, codes those of Connect, reasons and ports closed sets.
type Metrics struct {
	duration *prometheus.HistogramVec
	streams  *prometheus.CounterVec
	open     *prometheus.GaugeVec
	refusals *prometheus.CounterVec
	rejects  *prometheus.CounterVec
	accepts  *prometheus.CounterVec
}

// NewMetrics makes the metrics and registers them. Ports of one service share their series; registerer nil: the metrics
// are kept and not exposed.
func NewMetrics(registerer prometheus.Registerer) (*Metrics, error) {
	m := &Metrics{
		duration: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "rpc_server_duration_seconds", Help: "Time to answer a unary request, by procedure and code.",
			Buckets: []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10},
		}, []string{"procedure", "code"}),
		streams: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "rpc_server_streams_total", Help: "Ended streams, by procedure and code.",
		}, []string{"procedure", "code"}),
		open: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "rpc_server_streams_open", Help: "Streams that are open now, by procedure.",
		}, []string{"procedure"}),
		refusals: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "rpc_server_refusals_total", Help: "Requests and streams that were refused, by procedure and reason.",
		}, []string{"procedure", "reason"}),
		rejects: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "tls_rejects_total", Help: "Refused TLS handshakes, by port and reason.",
		}, []string{"port", "reason"}),
		accepts: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "tls_handshakes_total", Help: "Finished TLS handshakes, by port.",
		}, []string{"port"}),
	}
	if registerer == nil {
		return m, nil
	}
	return m, errors.Join(
		register(registerer, &m.duration), register(registerer, &m.streams), register(registerer, &m.open),
		register(registerer, &m.refusals), register(registerer, &m.rejects), register(registerer, &m.accepts),
	)
}

// register registers a collector, or takes in its place the one that another port of the service has registered, so
// that ports share their series.
func register[C prometheus.Collector](registerer prometheus.Registerer, c *C) error {
	err := registerer.Register(*c)
	if already, ok := errors.AsType[prometheus.AlreadyRegisteredError](err); ok {
		if *c, ok = already.ExistingCollector.(C); ok {
			return nil
		}
	}
	if err != nil {
		return fmt.Errorf("register rpc metrics: %w", err)
	}
	return nil
}

// Unary counts a call that was answered, with its code and duration.
func (m *Metrics) Unary(procedure, code string, took time.Duration) {
	m.duration.WithLabelValues(procedure, code).Observe(took.Seconds())
}

// refused counts a refusal by the reason that the caller gets. A number that the enum does not have may come from a
// peer of a later build: those share one series.
func (m *Metrics) refused(procedure string, reason commonv1.Reason) {
	if _, known := commonv1.Reason_name[int32(reason)]; !known {
		reason = commonv1.Reason_REASON_UNSPECIFIED
	}
	m.refusals.WithLabelValues(procedure, names.Of(reason)).Inc()
}

// Handshake counts a finished TLS handshake.
func (m *Metrics) Handshake(port string) { m.accepts.WithLabelValues(port).Inc() }

// Reject counts a refused TLS handshake.
func (m *Metrics) Reject(port string, reason pki.RejectReason) {
	m.rejects.WithLabelValues(port, string(reason)).Inc()
}
