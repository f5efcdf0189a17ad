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

// Check returns nil if the thing that it checks works. It returns when its context ends.
type Check func(ctx context.Context) error

// Health holds the named checks of a process. A process is ready if every check passes and it does not drain; it is
// live if the live checks pass: a lost database makes a process not ready, and restarting the process would not help.
type Health struct {
	mu       sync.Mutex
	ready    []named
	live     []named
	watched  []named
	draining string
	parts    map[string]part // the last samples, by the check's name
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

// Live adds a check whose failure only a restart can repair.
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

// Drain makes the process not ready for the given reason, until it ends.
func (h *Health) Drain(reason string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if reason == "" {
		reason = "shutting down"
	}
	h.draining = reason
}

// Report is the body of the health endpoints' answers.
type Report struct {
	Status   string        `json:"status"`   // ok or failed
	Draining string        `json:"draining"` // why, or empty
	Checks   []CheckResult `json:"checks"`
	// Watched are the checks without which the process is ready too, from the last sample: ok, down, unknown or off.
	Watched []CheckResult `json:"watched"`
}

// CheckResult is one check's part of a Report.
type CheckResult struct {
	Name            string  `json:"name"`
	Status          string  `json:"status"` // ok or failed
	Reason          string  `json:"reason"` // the fault's reason, or empty
	Message         string  `json:"message"`
	DurationSeconds float64 `json:"duration_seconds"`
}

// OK reports whether no check failed and the process does not drain.
func (r Report) OK() bool { return r.Status == statusOK }

const (
	statusOK     = "ok"
	statusFailed = "failed"
)

// ReadyReport runs the readiness and liveness checks at the same time and returns their results, in the order in which
// the checks were added.
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

// ask runs checks at the same time and returns the result of each.
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

// result returns a check's result with the public part of a fault, or the redacted text of any other error, since only
// operators reach the ops listener.
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
		_ = json.NewEncoder(w).Encode(answer) // the client has gone
	})
}
