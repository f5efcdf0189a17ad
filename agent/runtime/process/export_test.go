package process

import "context"

// ObserveChanges is observeChanges, which Run calls.
func (r *Runtime) ObserveChanges(ctx context.Context) bool { return r.observeChanges(ctx) }
