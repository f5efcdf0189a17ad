package service

import (
	"context"
	"fmt"
	"log/slog"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/config"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/pg"
)

// Numbering is the loop by which a process gives committed events their numbers (events.Sequencer), and the connection
// on which it listens for notifications of other processes. Both log in as the role sequencer, which may do nothing
// else. A service has one of its own, or shares that of its process (WithNumbering): its services then share the
// signals too.
type Numbering struct {
	// Wake is notified after a commit that appended events; Numbered fires when any process numbered some.
	Wake, Numbered *events.Signal
	// Settings fires when any process changed the policy or the signing keys.
	Settings *events.Signal

	logger *slog.Logger
	pool   *pgxpool.Pool
	seq    *events.Sequencer
	listen *events.Listener
}

// sequencerConns are for a round of numbering and a notification beside it. The connection that listens is not one of
// the pool.
const sequencerConns = 2

// NewNumbering makes the loop and the listener of a process. The name stands in the names of their sessions. It does
// not dial.
func NewNumbering(
	ctx context.Context, logger *slog.Logger, name string, urlFile config.SecretFile,
) (*Numbering, error) {
	url, err := urlFile.Read()
	if err != nil {
		return nil, fmt.Errorf("read sequencer url: %w", err)
	}
	n := &Numbering{Wake: &events.Signal{}, Numbered: &events.Signal{}, Settings: &events.Signal{}, logger: logger}
	n.pool, err = pg.Open(ctx, pg.Config{
		URL: url.Reveal(), ApplicationName: "gpuaas-" + name + "-sequencer", MaxConns: sequencerConns,
	})
	if err != nil {
		return nil, fmt.Errorf("open database as sequencer: %w", err)
	}
	deps := events.SequencerDeps{Pool: n.pool, Wake: n.Wake, Numbered: n.Numbered, Logger: logger}
	if n.seq, err = events.NewSequencer(deps, events.SequencerConfig{}); err != nil {
		n.Close()
		return nil, fmt.Errorf("build sequencer: %w", err)
	}
	heard := events.ListenerDeps{
		Pool: n.pool, Numbered: n.Numbered, Settings: n.Settings, Wake: n.Wake, Logger: logger,
	}
	if n.listen, err = events.NewListener(heard); err != nil {
		n.Close()
		return nil, fmt.Errorf("build listener: %w", err)
	}
	return n, nil
}

// tasks returns the loops, to be run among those of a process that ends them after its services have ended theirs.
func (n *Numbering) tasks() []app.Task {
	return []app.Task{
		{Name: "sequencer", Phase: app.PhaseLeases, Run: n.seq.Run},
		{Name: "listener", Run: n.listen.Run},
	}
}

// Run numbers and listens until ctx ends, and closes what NewNumbering opened. Only a Numbering that services share is
// run so.
func (n *Numbering) Run(ctx context.Context) error {
	defer n.Close()
	if err := app.Run(ctx, n.logger, n.tasks()...); err != nil {
		return fmt.Errorf("number events: %w", err)
	}
	return nil
}

// Close closes the pool.
func (n *Numbering) Close() { n.pool.Close() }
