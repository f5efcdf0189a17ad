package nodeapi

import (
	"errors"
	"fmt"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/gpuaas/mesh/services/nodeapi/session/bounds"
)

// metrics of the service. Labels come from closed sets; ids are never labels.
type metrics struct {
	rejects  *prometheus.CounterVec
	claims   *prometheus.CounterVec
	forgot   prometheus.Counter
	shed     prometheus.Counter
	stalled  prometheus.Counter
	opened   *prometheus.CounterVec
	refused  *prometheus.CounterVec
	frames   *prometheus.CounterVec
	profiles *prometheus.CounterVec
	cut      *prometheus.CounterVec
	facts    *prometheus.CounterVec
	offered  prometheus.Counter
	acked    prometheus.Counter
}

func newMetrics(reg prometheus.Registerer, open func() float64) (*metrics, error) {
	m := &metrics{
		rejects: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "agent_handshakes_refused_total",
			Help: "Handshakes refused at the agents' port, by reason.",
		}, []string{"reason"}),
		claims: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "nodeapi_ingress_rejections_total",
			Help: "Handshakes refused at the agents' port because of the client's certificate, by reason.",
		}, []string{"reason"}),
		forgot: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "nodeapi_ingress_rejections_forgotten_total",
			Help: "Claimed nodes whose rejections were forgotten because too many were claimed.",
		}),
		shed: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "agent_connections_shed_total",
			Help: "Connections closed before TLS because too many were open, or other openings came first for too long.",
		}),
		stalled: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "agent_openings_stalled_total",
			Help: "Openings whose client was awaited for so long that another may begin in their place.",
		}),
		opened: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "agent_streams_total",
			Help: "Streams of agents that ended, by outcome.",
		}, []string{"outcome"}),
		refused: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "agent_refusals_total",
			Help: "Streams of agents that were refused or ended by a denial, by reason.",
		}, []string{"reason"}),
		frames: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "agent_frames_total",
			Help: "Frames of agents, by kind.",
		}, []string{"kind"}),
		profiles: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "agent_profile_offers_total",
			Help: "Offers of another profile to agents, and their answers: taken, refused, or to no offer.",
		}, []string{"outcome"}),
		cut: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "agent_diagnostics_cut_total",
			Help: "Entries of hosts' diagnostic records that agents sent and that were cut, by cause: size, or time (one that " +
				"cannot be stored, or is in the future).",
		}, []string{"cause"}),
		facts: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "agent_facts_cut_total",
			Help: "What was cut of the facts that agents reported of their hosts: gpus, addresses or texts beyond the bounds.",
		}, []string{"fact"}),
		offered: prometheus.NewCounter(prometheus.CounterOpts{Name: "tasks_offered_total", Help: "Tasks offered to agents."}),
		acked: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "task_results_acknowledged_total",
			Help: "Results acknowledged to agents.",
		}),
	}
	var errs []error
	for _, c := range []prometheus.Collector{
		m.rejects, m.claims, m.forgot, m.shed, m.stalled, m.opened, m.refused, m.frames, m.profiles, m.cut, m.facts,
		m.offered, m.acked,
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "agent_streams", Help: "Streams of agents that stand open here."},
			open),
	} {
		errs = append(errs, reg.Register(c))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, fmt.Errorf("register metrics: %w", err)
	}
	return m, nil
}

// TLSReject counts a refused handshake.
func (m *metrics) TLSReject(reason string) { m.rejects.WithLabelValues(reason).Inc() }

// IngressRejected counts a client whose certificate was refused.
func (m *metrics) IngressRejected(reason string) { m.claims.WithLabelValues(reason).Inc() }

// IngressForgotten counts a claimed node whose rejections were forgotten.
func (m *metrics) IngressForgotten() { m.forgot.Inc() }

// Shed counts a connection closed before TLS.
func (m *metrics) Shed() { m.shed.Inc() }

// Stalled counts an opening whose client was awaited for too long.
func (m *metrics) Stalled() { m.stalled.Inc() }

// Opened counts a stream that ended.
func (m *metrics) Opened(outcome string) { m.opened.WithLabelValues(outcome).Inc() }

// Profile counts an offer of a profile, or the answer to one.
func (m *metrics) Profile(outcome string) { m.profiles.WithLabelValues(outcome).Inc() }

// Cut counts what was cut of an agent's frame.
func (m *metrics) Cut(c bounds.Cut) {
	if c == (bounds.Cut{}) {
		return
	}
	for cause, n := range map[string]int{"size": c.Size, "time": c.Time} {
		if n > 0 {
			m.cut.WithLabelValues(cause).Add(float64(n))
		}
	}
	for fact, n := range map[string]int{"gpus": c.Facts.GPUs, "addresses": c.Facts.Addresses, "texts": c.Facts.Texts} {
		if n > 0 {
			m.facts.WithLabelValues(fact).Add(float64(n))
		}
	}
}

// Refused counts a denial. Reasons come from the closed enumeration.
func (m *metrics) Refused(reason string) { m.refused.WithLabelValues(reason).Inc() }

// Frame counts a frame.
func (m *metrics) Frame(kind string) { m.frames.WithLabelValues(kind).Inc() }

// Offered counts offers.
func (m *metrics) Offered(n int) { m.offered.Add(float64(n)) }

// Acknowledged counts acknowledged results.
func (m *metrics) Acknowledged(n int) { m.acked.Add(float64(n)) }
