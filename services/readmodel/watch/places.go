package watch

import (
	"cmp"
	"fmt"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/config"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/rpc"
)

// Limits bounds the watches that are open at once on one replica. A zero field takes its share of Streams.
type Limits struct {
	// Streams in all; 1024.
	Streams int
	// Person is the most of one person, whatever the number of sessions; 1/32 of Streams.
	Person int
	// Tenant is the most of all persons of one tenant; 1/8 of Streams.
	Tenant int
	// Operators is how many of Streams are kept for people of the operator who hold the role operator or security; 1/4
	// of Streams.
	Operators int
}

// WithDefaults returns the limits with every zero field filled in.
func (l Limits) WithDefaults() Limits {
	l.Streams = cmp.Or(l.Streams, 1024)
	return config.Or(l, Limits{Person: max(1, l.Streams/32), Tenant: max(1, l.Streams/8), Operators: l.Streams / 4})
}

// shared returns how many places there are for people who are not operators.
func (l Limits) shared() int { return l.Streams - l.Operators }

// Validate returns an error if limits contradict each other.
func (l Limits) Validate() error {
	l = l.WithDefaults()
	if l.Operators >= l.Streams {
		return fmt.Errorf("all %d watch streams are kept for operators", l.Streams)
	}
	if l.Person > l.Streams || l.Tenant > l.shared() {
		return fmt.Errorf("a person may open %d watch streams and a tenant %d, of %d and %d that exist",
			l.Person, l.Tenant, l.Streams, l.shared())
	}
	return nil
}

// Kinds of holders of a place, the values of a metric's label.
const (
	holderOperator = "operator" // of no tenant, with the role operator or security: may use the places that are kept
	holderViewer   = "viewer"   // of no tenant, any other role
	holderTenant   = "tenant"
)

func holderKind(p rpc.Person) string {
	switch {
	case p.TenantID != "":
		return holderTenant
	case p.Has("operator", "security"):
		return holderOperator
	}
	return holderViewer
}

// Bounds that refuse a watch, the values of a metric's label.
const (
	boundPerson = "person"
	boundTenant = "tenant"
	boundShared = "shared" // of all people who are not operators
	boundTotal  = "total"
)

// fullWait is how long a refused watcher waits: places come back whenever a watch ends.
const fullWait = 5 * time.Second

// personKey names a person: subjects are unique in one tenant, and among the people of the operator.
type personKey struct{ tenantID, subject string }

// places counts the watches that are open, by person, by tenant and by kind of holder. Its maps have no entry for a
// person or tenant that has no watch open.
type places struct {
	limits Limits

	mu      sync.Mutex
	total   int
	persons map[personKey]int
	tenants map[string]int
	kinds   map[string]int

	refused *prometheus.CounterVec
}

func newPlaces(limits Limits) *places {
	return &places{
		limits: limits, persons: map[personKey]int{}, tenants: map[string]int{}, kinds: map[string]int{},
		refused: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "watch_refused_total", Help: "Watches that were refused because a bound was reached, by bound.",
		}, []string{"bound"}),
	}
}

// take reserves a place for a watch of a person. The returned function gives it back; calling it again changes nothing.
func (p *places) take(person rpc.Person) (func(), error) {
	key, kind := personKey{person.TenantID, person.Subject}, holderKind(person)
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := p.refusal(key, kind); err != nil {
		return nil, err
	}
	p.total++
	p.persons[key]++
	p.kinds[kind]++
	if kind == holderTenant {
		p.tenants[person.TenantID]++
	}
	return sync.OnceFunc(func() { p.release(key, kind) }), nil
}

// refusal returns why one more watch cannot be opened; nil if it can.
func (p *places) refusal(key personKey, kind string) error {
	full := func(bound string, reason commonv1.Reason, public, remedy string) error {
		p.refused.WithLabelValues(bound).Inc()
		return fault.New(reason, public, fault.Remedy(remedy), fault.RetryAfter(fullWait))
	}
	const endOne = "end a watch that is not needed, or ask again when one has ended"
	const later = "ask again after the given time; add replicas if it stays"
	switch {
	case p.persons[key] >= p.limits.Person:
		return full(boundPerson, commonv1.Reason_REASON_RATE_LIMITED,
			fmt.Sprintf("you have %d watches open here, the most that one person may have", p.persons[key]), endOne)
	case kind == holderTenant && p.tenants[key.tenantID] >= p.limits.Tenant:
		return full(boundTenant, commonv1.Reason_REASON_RATE_LIMITED,
			fmt.Sprintf("your tenant has %d watches open here, the most that one may have", p.tenants[key.tenantID]), endOne)
	case p.total >= p.limits.Streams:
		return full(boundTotal, commonv1.Reason_REASON_OVERLOADED, "too many watches are open here", later)
	case kind != holderOperator && p.total-p.kinds[holderOperator] >= p.limits.shared():
		return full(boundShared, commonv1.Reason_REASON_OVERLOADED,
			"too many watches are open here; the places that are left are kept for operators", later)
	}
	return nil
}

func (p *places) release(key personKey, kind string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.total--
	p.kinds[kind]--
	if p.persons[key]--; p.persons[key] == 0 {
		delete(p.persons, key)
	}
	if kind != holderTenant {
		return
	}
	if p.tenants[key.tenantID]--; p.tenants[key.tenantID] == 0 {
		delete(p.tenants, key.tenantID)
	}
}

// collectors returns the metrics of the places. Persons and tenants are never labels.
func (p *places) collectors() []prometheus.Collector {
	out := []prometheus.Collector{p.refused}
	for _, kind := range []string{holderOperator, holderViewer, holderTenant} {
		out = append(out, prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "watch_streams", Help: "Watch streams that are open here, by kind of person.",
			ConstLabels: prometheus.Labels{"holder": kind},
		}, func() float64 {
			p.mu.Lock()
			defer p.mu.Unlock()
			return float64(p.kinds[kind])
		}))
	}
	for bound, value := range map[string]int{
		boundPerson: p.limits.Person, boundTenant: p.limits.Tenant,
		boundShared: p.limits.shared(), boundTotal: p.limits.Streams,
	} {
		out = append(out, prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "watch_streams_limit", Help: "Watch streams that may be open here, by bound.",
			ConstLabels: prometheus.Labels{"bound": bound},
		}, func() float64 { return float64(value) }))
		p.refused.WithLabelValues(bound)
	}
	return out
}
