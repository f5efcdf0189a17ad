package pg

import (
	"context"

	"github.com/jackc/pgx/v5"
)

// Batch collects statements that go to the server in one round trip. Outside of a transaction they form one of their
// own, which commits at the end.
type Batch struct{ queued pgx.Batch }

// Queue adds a statement. The caller sets on the result the function that handles its rows when the batch is sent.
func (b *Batch) Queue(s *Statement, args ...any) *pgx.QueuedQuery {
	return b.queued.Queue(s.text, args...)
}

// Send sends the statements and returns the first error of any, or of the handling of its rows.
func (b *Batch) Send(ctx context.Context, q interface {
	SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults
},
) error {
	return q.SendBatch(ctx, &b.queued).Close()
}
