package obs

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"sync"
	"time"

	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
)

// CheckTimeout is how long one health check may take.
const CheckTimeout = 2 * time.Second

// Check returns nil if what it looks at works. It heeds its context.
type Check func(ctx context.Context) error

// Health holds the named checks of a process. Readiness is every check and no drain; liveness is the live checks only: a lost database makes
// a process not ready, and restarting the process would not help.
type Health struct {
	mu       sync.Mutex
	ready    []named
	live     []named
	watched  []named
	draining string
	parts    map[string]part // by the check's name
}

type named struct {
	name  string
	check Check
}

// NewHealth returns a health without checks: alive and ready.
func NewHealth() *Health { return &Health{} }

// Ready adds a check of something that requests need. A check of the same name is replaced.
func (h *Health) Ready(name string, check Check) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.ready = put(h.ready, named{name, check})
}

// Live adds a check whose failure only a restart can mend.
func (h *Health) Live(name string, check Check) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.live = put(h.live, named{name, check})
}

func put(list []named, n named) []named {
	for i := range list {
		if list[i].name == n.name {
			list[i] = n
			return list
		}
	}
	return append(list, n)
}

// Drain makes the process not ready for the given reason, for good.
func (h *Health) Drain(reason string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if reason == "" {
		reason = "shutting down"
	}
	h.draining = reason
}

// Report is what the health endpoints answer.
type Report struct {
	Status   string        `json:"status"`   // ok or failed
	Draining string        `json:"draining"` // why, or empty
	Checks   []CheckResult `json:"checks"`
	Watched  []CheckResult `json:"watched"` // what the process does without if it must, as last looked at: ok, down, unknown or off
}

// CheckResult is one check's part of a Report.
type CheckResult struct {
	Name            string  `json:"name"`
	Status          string  `json:"status"` // ok or failed
	Reason          string  `json:"reason"` // the fault's reason, or empty
	Message         string  `json:"message"`
	DurationSeconds float64 `json:"duration_seconds"`
}

// OK says whether nothing failed and nothing drains.
func (r Report) OK() bool { return r.Status == statusOK }

const (
	statusOK     = "ok"
	statusFailed = "failed"
)

// ReadyReport runs the readiness and liveness checks at the same time and answers what they said, in the order they were added.
func (h *Health) ReadyReport(ctx context.Context) Report {
	h.mu.Lock()
	checks := append(append([]named(nil), h.live...), h.ready...)
	draining, watched := h.draining, h.watchedLocked()
	h.mu.Unlock()
	report := run(ctx, checks)
	report.Draining, report.Watched = draining, watched
	if draining != "" {
		report.Status = statusFailed
	}
	return report
}

// LiveReport runs the liveness checks.
func (h *Health) LiveReport(ctx context.Context) Report {
	h.mu.Lock()
	checks := append([]named(nil), h.live...)
	h.mu.Unlock()
	return run(ctx, checks)
}

// ask runs checks at the same time and answers what each said.
func ask(ctx context.Context, checks []named) []error {
	ctx, cancel := context.WithTimeout(ctx, CheckTimeout)
	defer cancel()
	errs := make([]error, len(checks))
	var wg sync.WaitGroup
	for i, c := range checks {
		wg.Go(func() { errs[i] = c.check(ctx) })
	}
	wg.Wait()
	return errs
}

func run(ctx context.Context, checks []named) Report {
	ctx, cancel := context.WithTimeout(ctx, CheckTimeout)
	defer cancel()
	report := Report{Status: statusOK, Checks: make([]CheckResult, len(checks))}
	var wg sync.WaitGroup
	for i, c := range checks {
		wg.Go(func() {
			begin := time.Now()
			err := c.check(ctx)
			report.Checks[i] = result(c.name, err, time.Since(begin))
		})
	}
	wg.Wait()
	for _, c := range report.Checks {
		if c.Status != statusOK {
			report.Status = statusFailed
		}
	}
	return report
}

// result shows a fault by its public part; another error's text is shown redacted, since only operators reach the ops listener.
func result(name string, err error, took time.Duration) CheckResult {
	r := CheckResult{Name: name, Status: statusOK, DurationSeconds: took.Seconds()}
	if err == nil {
		return r
	}
	r.Status = statusFailed
	if e, ok := fault.As(err); ok {
		r.Reason, r.Message = names.Of(e.Reason), e.Public
		return r
	}
	r.Message = Redact(err.Error())
	if errors.Is(err, context.DeadlineExceeded) {
		r.Message = "no answer within " + CheckTimeout.String()
	}
	return r
}

// LiveHandler serves /livez.
func (h *Health) LiveHandler() http.Handler { return serveReport(h.LiveReport) }

// ReadyHandler serves /readyz.
func (h *Health) ReadyHandler() http.Handler { return serveReport(h.ReadyReport) }

func serveReport(report func(context.Context) Report) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		answer := report(r.Context())
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("Cache-Control", "no-store")
		if !answer.OK() {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
		_ = json.NewEncoder(w).Encode(answer) //nolint:errcheck // the client has gone
	})
}
