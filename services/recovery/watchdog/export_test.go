package watchdog

import "context"

// Drain applies all events that exist now.
func (w *Watchdog) Drain(ctx context.Context) error { return w.consumer.Drain(ctx, Apply) }

// ForgottenAtOnce is the most rows of a table that one round deletes.
const ForgottenAtOnce = forgottenAtOnce
