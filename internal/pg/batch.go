package pg

import (
	"context"

	"github.com/jackc/pgx/v5"
)

// Batch collects statements that go to the server in one round trip. Outside of a transaction they are one by themselves, which commits at the end.
type Batch struct{ queued pgx.Batch }

// Queue adds a statement. The result says what to do with its rows, when the batch is sent.
func (b *Batch) Queue(s *Statement, args ...any) *pgx.QueuedQuery {
	return b.queued.Queue(s.text, args...)
}

// Send sends the statements and returns the first error of any, or of what was to be done with its rows.
func (b *Batch) Send(ctx context.Context, q interface {
	SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults
},
) error {
	return q.SendBatch(ctx, &b.queued).Close()
}
