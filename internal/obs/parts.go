package obs

import (
	"context"
	"errors"
	"slices"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
)

// ErrOff is answered by a check of something that is not configured, on purpose.
var ErrOff = errors.New("none is configured")

// sampleEvery is how often a process looks at what it reports. A caller gets the last sample, so that many callers ask a part once.
const sampleEvery = 2 * time.Second

// sampleSoon is how often it looks while something that it needs is down: what has just begun, or come back, is not called down for long.
const sampleSoon = 200 * time.Millisecond

// part is what the last looks at one thing found.
type part struct {
	state        commonv1.PartState
	since, at    time.Time
	reason       commonv1.Reason
	detail, next string
}

// Watch adds a check of something that requests can do without: it is reported, and the process is ready whatever it says. A check of the same name
// is replaced.
func (h *Health) Watch(name string, check Check) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.watched = put(h.watched, named{name, check})
}

// Run looks at every check again and again until ctx ends, so that Parts can say since when.
func (h *Health) Run(ctx context.Context) error {
	for {
		h.Sample(ctx)
		wait := sampleEvery
		if h.lacking() {
			wait = sampleSoon
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return nil
		}
	}
}

// lacking says whether the last look found something down that the process is not ready without.
func (h *Health) lacking() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.ContainsFunc(h.ready, func(c named) bool {
		p, ok := h.parts[c.name]
		return ok && p.state == commonv1.PartState_PART_STATE_DOWN
	})
}

// Sample looks once at every check that is not about this process alone.
func (h *Health) Sample(ctx context.Context) {
	h.mu.Lock()
	checks := append(slices.Clone(h.ready), h.watched...)
	h.mu.Unlock()
	errs := ask(ctx, checks)
	if ctx.Err() != nil {
		return // the checks failed for our own end
	}
	now := time.Now()
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.parts == nil {
		h.parts = map[string]part{}
	}
	for i, c := range checks {
		p := found(errs[i])
		p.at, p.since = now, now
		if before, ok := h.parts[c.name]; ok && before.state == p.state {
			p.since = before.since
		}
		h.parts[c.name] = p
	}
}

// found shows a fault by its public part. Another error's text stays here: the parts are shown to people who are not operators.
func found(err error) part {
	switch f, ok := fault.As(err); {
	case err == nil:
		return part{state: commonv1.PartState_PART_STATE_OK}
	case errors.Is(err, ErrOff):
		return part{state: commonv1.PartState_PART_STATE_OFF, detail: ErrOff.Error()}
	case ok:
		return part{state: commonv1.PartState_PART_STATE_DOWN, reason: f.Reason, detail: f.Public, next: f.Remedy}
	default:
		f = fault.New(commonv1.Reason_REASON_UNAVAILABLE, "it does not answer, or not as it should")
		return part{state: commonv1.PartState_PART_STATE_DOWN, reason: f.Reason, detail: f.Public, next: f.Remedy}
	}
}

// Parts returns what the last look found, in the order in which the checks were added: those that the process is not ready without first. A check
// that was not looked at yet is not among them.
func (h *Health) Parts() []*commonv1.Part {
	h.mu.Lock()
	defer h.mu.Unlock()
	var out []*commonv1.Part
	add := func(list []named, required bool) {
		for _, c := range list {
			p, ok := h.parts[c.name]
			if !ok {
				continue
			}
			out = append(out, &commonv1.Part{
				Name: c.name, State: p.state, Since: timestamppb.New(p.since), ObservedAt: timestamppb.New(p.at), Reason: p.reason, Detail: p.detail,
				NextAction: p.next, Required: required,
			})
		}
	}
	add(h.ready, true)
	add(h.watched, false)
	return out
}

// Draining says why the process takes no new work, empty if it does.
func (h *Health) Draining() string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.draining
}

// watchedLocked is what /readyz says of the watched parts. None of it makes the process less ready.
func (h *Health) watchedLocked() []CheckResult {
	var out []CheckResult
	for _, c := range h.watched {
		p, ok := h.parts[c.name]
		if !ok {
			continue
		}
		r := CheckResult{Name: c.name, Status: names.Of(p.state), Message: p.detail}
		if p.reason != commonv1.Reason_REASON_UNSPECIFIED {
			r.Reason = names.Of(p.reason)
		}
		out = append(out, r)
	}
	return out
}
