package work

import (
	"time"

	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
)

// pending is the updates of one session that have not been reported.
type pending struct {
	report *lifecyclev1.NodeReport
	since  time.Time
	frames int
	bytes  int
}

// due returns when the updates must be reported at the latest: at once if there are results or many frames, else after
// lazyWait.
func (p *pending) due() time.Time {
	if len(p.report.GetResults()) > 0 || p.frames >= perNodeFrames/2 {
		return p.since
	}
	return p.since.Add(lazyWait)
}

// part splits updates that are due into those to report now and those that go on waiting, nil if there are none.
// Results go with all other updates of their tasks; updates of other tasks wait for their results until lazyWait has
// passed. Tasks are independent of each other, so their order may change. The updates of one task are never separated
// from each other, or from the envelopes that prove them.
func (p *pending) part(now time.Time) (*pending, *pending) {
	if p.frames >= perNodeFrames/2 || len(p.report.GetSigned()) > 0 || !p.since.Add(lazyWait).After(now) {
		return p, nil
	}
	ended := make(map[string]bool, len(p.report.GetResults()))
	for _, r := range p.report.GetResults() {
		ended[r.GetTask().GetTaskId()] = true
	}
	n := p.report
	rest := &lifecyclev1.NodeReport{
		NodeId: n.GetNodeId(), NodeInstanceId: n.GetNodeInstanceId(), SessionId: n.GetSessionId(),
		Generation: n.GetGeneration(), LedgerId: n.GetLedgerId(),
	}
	n.Delivered, rest.Delivered = divide(n.GetDelivered(),
		func(ref *nodev1.TaskRef) bool { return ended[ref.GetTaskId()] })
	n.Started, rest.Started = divide(n.GetStarted(),
		func(f *nodev1.TaskStarted) bool { return ended[f.GetTask().GetTaskId()] })
	n.Progress, rest.Progress = divide(n.GetProgress(),
		func(f *nodev1.TaskProgress) bool { return ended[f.GetTask().GetTaskId()] })
	frames := len(rest.GetDelivered()) + len(rest.GetStarted()) + len(rest.GetProgress())
	if frames == 0 {
		return p, nil
	}
	return &pending{report: n, since: p.since, frames: p.frames - frames, bytes: p.bytes},
		&pending{report: rest, since: p.since, frames: frames}
}

// divide returns the elements for which goes returns true, and the others.
func divide[T any](all []T, goes func(T) bool) ([]T, []T) {
	var taken, left []T
	for _, v := range all {
		if goes(v) {
			taken = append(taken, v)
		} else {
			left = append(left, v)
		}
	}
	return taken, left
}

func (p *pending) full() bool {
	if p == nil {
		return false
	}
	n := p.report
	return p.bytes >= perNodeBytes || len(n.GetDelivered()) >= perNodeFrames-256 || len(n.GetStarted()) >= perNodeFrames ||
		len(n.GetProgress()) >= perNodeFrames || len(n.GetResults()) >= perNodeFrames
}
