// Package beat publishes that a replica of nodeapi listens to agents: it writes the replica's row of mesh.replica every
// five seconds, and reads the database's clock with the same statement. It owns that row and its events; it knows no
// session, only how many there are.
//
// A replica whose row is older than replicas.SilentAfter counts as gone for the rest of the mesh.
package beat

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"google.golang.org/protobuf/types/known/timestamppb"

	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/replicas"
	"github.com/gpuaas/mesh/internal/wallclock"
)

// Deps is what a Publisher works with.
type Deps struct {
	Logger    *slog.Logger
	DB        *pgxpool.Pool
	ReplicaID string
	Address   string // host:port at which other services reach the replica
	// Wake tells this process's sequencer of new events.
	Wake func()
	// Counts returns how many sessions stand here and how many of them are late.
	Counts func() (sessions, late int)
	// Crowded returns whether agents were turned away or had to wait since it was called last; nil: never.
	Crowded func() bool
	// Back is called after the first beat that follows a silence in which the replica counted as gone.
	Back func()
	// OnTime is given each reading of the database's clock.
	OnTime func(sent, received, server time.Time)
	// Trust returns what the agents' port trusts now, for the replica's row; nil: the row does not have it.
	Trust func() replicas.Trust
}

// Publisher writes the beats of one replica. Safe for concurrent use.
type Publisher struct {
	deps Deps
	now  func() time.Time

	writing sync.Mutex // held for a beat, so that none that began before the last one is written after it
	left    bool       // the last beat has begun; guarded by writing
	crowded bool       // since the last beat that was written; guarded by writing
	// trust is what the row has of the agents' port, nil if that is not known; guarded by writing.
	trust *replicas.Trust

	mu     sync.Mutex
	lastOK time.Time // when the last beat was written, by this host's clock
	beatAt time.Time // the same by the database's clock, by which a replica counts as gone
}

// New makes a publisher. It writes nothing before Run.
func New(deps Deps) *Publisher { return &Publisher{deps: deps, now: time.Now} }

// Run writes beats until ctx ends.
func (p *Publisher) Run(ctx context.Context) error {
	tick, trustTick := time.NewTicker(replicas.Every), time.NewTicker(trustEvery)
	defer tick.Stop()
	defer trustTick.Stop()
	p.beat(ctx, false)
	for {
		select {
		case <-tick.C:
			p.beat(ctx, false)
		case <-trustTick.C:
			p.publishChangedTrust(ctx)
		case <-ctx.Done():
			return nil
		}
	}
}

// Leave writes a beat that marks the replica as leaving.
func (p *Publisher) Leave(ctx context.Context) { p.beat(ctx, true) }

// beat writes the replica's row, which marks it as listening. It appends an event only on a change: the replica has
// started, is back after a silence in which it counted as gone, or leaves.
func (p *Publisher) beat(ctx context.Context, leaving bool) {
	p.writing.Lock()
	defer p.writing.Unlock()
	if p.left && !leaving {
		return
	}
	p.left = p.left || leaving
	ctx, cancel := context.WithTimeout(ctx, replicas.Every)
	defer cancel()
	sessions, late := p.deps.Counts()
	beat := replicas.Beat{
		ReplicaID: p.deps.ReplicaID, Address: p.deps.Address, Sessions: sessions, Late: late, Leaving: leaving,
	}
	if p.deps.Crowded != nil && p.deps.Crowded() {
		p.crowded = true
	}
	beat.Crowded = p.crowded
	changed := leaving || p.silence() > replicas.SilentAfter
	sent := wallclock.Now()
	written, err := p.write(ctx, beat, changed)
	if err != nil {
		p.deps.Logger.WarnContext(ctx, "replica beat not written", slog.Any("error", err))
		return
	}
	p.crowded = false
	p.deps.OnTime(sent, wallclock.Now(), written.BeatAt)
	p.publishTrust(ctx, written.Version == 1)
	p.mu.Lock()
	back := !leaving && !p.beatAt.IsZero() && written.BeatAt.Sub(p.beatAt) >= replicas.SilentAfter
	p.lastOK, p.beatAt = p.now(), written.BeatAt
	p.mu.Unlock()
	if changed {
		p.deps.Wake()
	}
	if back {
		p.deps.Back()
	}
}

// silence returns how long ago a beat was written.
func (p *Publisher) silence() time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.now().Sub(p.lastOK)
}

func (p *Publisher) write(ctx context.Context, beat replicas.Beat, changed bool) (replicas.Written, error) {
	if !changed {
		return replicas.Write(ctx, p.deps.DB, beat)
	}
	var written replicas.Written
	err := pg.InTx(ctx, p.deps.DB, func(ctx context.Context, tx pgx.Tx) error {
		var err error
		if written, err = replicas.Write(ctx, tx, beat); err != nil {
			return err
		}
		_, err = events.Append(ctx, tx, events.Event{
			Kind: "replica.beat", AggregateType: "replica", AggregateID: beat.ReplicaID, AggregateVersion: written.Version,
			Payload: &nodev1.ReplicaBeat{
				ReplicaId: beat.ReplicaID, Address: beat.Address, StartedAt: timestamppb.New(written.StartedAt),
				BeatAt: timestamppb.New(written.BeatAt),
				// counts of sessions of one process
				Sessions: int32(beat.Sessions), Late: int32(beat.Late), Leaving: beat.Leaving, Version: written.Version,
			},
		})
		return err
	})
	return written, err
}

// Health returns an error if no beat has been written for so long that the rest of the mesh does not see this replica.
func (p *Publisher) Health(context.Context) error {
	if since := p.silence(); since > replicas.SilentAfter {
		return fmt.Errorf("no beat written for %s", since.Truncate(time.Second))
	}
	return nil
}
