package judge

import (
	"context"
	"time"
)

// Drain keeps the evidence in all events of the log.
func (j *Judge) Drain(ctx context.Context) error { return j.consumer.Drain(ctx, j.apply) }

// ReadRoots reads the roots of the authority once.
func (j *Judge) ReadRoots(ctx context.Context) { j.trust.refresh(ctx, j.deps) }

// ProbeRound makes one round of Probe, and returns the longest time until the next one.
func (j *Judge) ProbeRound(ctx context.Context) (time.Duration, error) {
	err := j.probeRound(ctx)
	return j.reprobe, err
}

// Pause returns a function that waits as Run does between two rounds, for at most the given time. It returns false when
// its context has ended first.
func (j *Judge) Pause(longest time.Duration) func(context.Context) bool {
	j.next = longest
	return j.pause()
}
