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

// ErrOff is returned by a check of something that is, on purpose, not configured.
var ErrOff = errors.New("none is configured")

// sampleEvery is how often a process runs its checks. A caller gets the last sample, so that many callers cause one
// check.
const sampleEvery = 2 * time.Second

// sampleSoon is how often it runs them while something that it needs is down, so that a part that has just started or
// come back is not reported as down for long.
const sampleSoon = 200 * time.Millisecond

// part is the result of the last samples of one check.
type part struct {
	state        commonv1.PartState
	since, at    time.Time
	reason       commonv1.Reason
	detail, next string
}

// Watch adds a check of something that requests can do without: its result is reported, and the process is ready
// whatever the result is. A check of the same name is replaced.
func (h *Health) Watch(name string, check Check) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.watched = put(h.watched, named{name, check})
}

// Run samples every check periodically until ctx ends, so that Parts can report since when a part has had its state.
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

// lacking reports whether in the last sample something was down without which the process is not ready.
func (h *Health) lacking() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.ContainsFunc(h.ready, func(c named) bool {
		p, ok := h.parts[c.name]
		return ok && p.state == commonv1.PartState_PART_STATE_DOWN
	})
}

// Sample runs once every check that is not about this process alone.
func (h *Health) Sample(ctx context.Context) {
	h.mu.Lock()
	checks := append(slices.Clone(h.ready), h.watched...)
	h.mu.Unlock()
	errs := ask(ctx, checks)
	if ctx.Err() != nil {
		return // the checks failed because ctx ended
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

// found returns the part of a check's error, with the public text of a fault. It leaves out the text of any other
// error: the parts are shown to people who are not operators.
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

// Parts returns the last sample, in the order in which the checks were added, those without which the process is not
// ready first. A check that was not sampled yet is not among them.
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
				Name: c.name, State: p.state, Since: timestamppb.New(p.since), ObservedAt: timestamppb.New(p.at), Reason: p.reason,
				Detail: p.detail, NextAction: p.next, Required: required,
			})
		}
	}
	add(h.ready, true)
	add(h.watched, false)
	return out
}

// Draining returns why the process accepts no new work, empty if it accepts work.
func (h *Health) Draining() string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.draining
}

// watchedLocked returns the watched parts for /readyz. None of them makes the process not ready.
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
