package ingress

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"
	"google.golang.org/protobuf/proto"

	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/pg"
)

// Kind is the kind of the events.
const Kind = "ingress.rejected"

// Run writes rejections until ctx ends. Without rejections it waits.
func (r *Rejections) Run(ctx context.Context) error {
	timer := time.NewTimer(0)
	defer timer.Stop()
	var wrote time.Time
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-r.poke:
			if since := r.elapsed().Sub(wrote); since < pace {
				timer.Reset(pace - since)
				continue
			}
		case <-timer.C:
		}
		wrote = r.elapsed()
		if next := r.flush(ctx); next > 0 {
			timer.Reset(next)
		}
	}
}

// flush writes what is due, and returns when more will be; zero: not before there is news.
func (r *Rejections) flush(ctx context.Context) time.Duration {
	due, next := r.take(r.elapsed())
	if len(due) == 0 {
		return next
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	if err := r.write(ctx, due); err != nil {
		r.giveBack(due)
		r.deps.Logger.WarnContext(ctx, "rejections of the ingress not written", slog.Int("rejections", len(due)),
			slog.Any("error", err))
		return 5 * pace
	}
	r.deps.Wake()
	return next
}

// due is an entry with its fact as it is to be written.
type due struct {
	entry *entry
	fact  *nodev1.IngressRejected
	known bool
	wrote time.Time // when it was written before
}

// take returns the entries whose event is due, and when the next ones are.
func (r *Rejections) take(at time.Time) ([]due, time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var out []due
	next := time.Duration(0)
	for _, p := range []*part{r.known, r.unknown} {
		taken, wait := p.take(at)
		for _, e := range taken {
			e.fact.Version = max(e.fact.GetVersion()+1, e.fact.GetLastSeenAt().AsTime().UnixMicro())
			out = append(out, due{entry: e, fact: proto.CloneOf(e.fact), known: p == r.known, wrote: e.written})
			e.written = at
		}
		if wait > 0 && (next == 0 || wait < next) {
			next = wait
		}
	}
	return out, next
}

// take takes the entries that are due out of those that wait, as many as one write may have.
func (p *part) take(at time.Time) ([]*entry, time.Duration) {
	var out []*entry
	rest := p.waiting[:0]
	next := time.Duration(0)
	earlier := func(wait time.Duration) {
		if wait = max(wait, pace); next == 0 || wait < next {
			next = wait
		}
	}
	for _, e := range p.waiting {
		wait := every - at.Sub(e.written)
		switch {
		case e.place == nil: // it was forgotten
		case !e.written.IsZero() && wait > 0:
			earlier(wait)
			rest = append(rest, e)
		case len(out) < p.perWrite:
			e.waits = false
			out = append(out, e)
		default:
			earlier(pace)
			rest = append(rest, e)
		}
	}
	clear(p.waiting[len(rest):])
	p.waiting = rest
	return out, next
}

// giveBack has entries whose event could not be written wait again.
func (r *Rejections) giveBack(list []due) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, d := range list {
		p := r.unknown
		if d.known {
			p = r.known
		}
		d.entry.written = d.wrote
		if !d.entry.waits && d.entry.place != nil {
			p.wait(d.entry)
		}
	}
}

func (r *Rejections) write(ctx context.Context, list []due) error {
	evs := make([]events.Event, len(list))
	for i, d := range list {
		f := d.fact
		evs[i] = events.Event{
			Kind: Kind, AggregateType: "ingress_rejection", AggregateID: f.GetRejectionId(), AggregateVersion: f.GetVersion(),
			Payload: f, Correlation: events.Correlation{CorrelationID: f.GetRejectionId()},
		}
		if d.known { // an invented name stands in no node's timeline
			evs[i].NodeID = f.GetClaimedNodeId()
		}
	}
	err := pg.InTx(ctx, r.deps.DB, func(ctx context.Context, tx pgx.Tx) error {
		_, err := events.Append(ctx, tx, evs...)
		return err
	})
	if err != nil {
		return fmt.Errorf("write rejections of the ingress: %w", err)
	}
	return nil
}
