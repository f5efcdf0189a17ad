package judge

import "context"

// Drain keeps the evidence in all events of the log.
func (j *Judge) Drain(ctx context.Context) error { return j.consumer.Drain(ctx, j.apply) }

// ReadRoots reads the roots of the authority once.
func (j *Judge) ReadRoots(ctx context.Context) { j.trust.refresh(ctx, j.deps) }
