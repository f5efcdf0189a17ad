package reconnect

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gpuaas/mesh/bench/process"
	"github.com/gpuaas/mesh/internal/app"
)

// Kinds of children.
const (
	childAgents  = "reconnect-agents"
	childClients = "reconnect-clients"
	childServer  = "reconnect-server"
)

// loadConfig is the configuration of a process of clients.
type loadConfig struct {
	Enrolled string   // the file of the fleet
	Addrs    []string // of which each connection takes one at random
}

// serverConfig is the configuration of a bare server.
type serverConfig struct{ Addr, Identity, NodeRoots, TrustDomain string }

// Child serves a child process of this bench, until in ends; false if the kind is not one of its own.
func Child(ctx context.Context, kind string, in io.Reader, out io.Writer, _ *slog.Logger) (bool, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	switch kind {
	case childAgents:
		return true, serveLoad(ctx, cancel, in, out, startAgent)
	case childClients:
		return true, serveLoad(ctx, cancel, in, out, startClient)
	case childServer:
		defer app.BoundHeap()() // as a process of nodeapi does
		return true, process.Serve(ctx, in, out, process.Verbs{
			"listen": process.With(func(_ context.Context, cfg serverConfig) (any, error) {
				return nil, listen(ctx, cfg)
			}),
		})
	default:
		return false, nil
	}
}

// load is many clients in one process.
type load struct {
	places []*place
	back   atomic.Int64 // since the last mark
	wg     sync.WaitGroup
}

// place holds how one client came back since the last mark.
type place struct {
	load    *load
	fleet   *enrolled
	addrs   []string
	dialled atomic.Int64 // the last time; nanoseconds since 1970
	done    atomic.Int64 // zero: it is not back
	tries   atomic.Int64
}

// comeback is how one client came back. Dialled is when the connection was begun that stands.
type comeback struct{ Dialled, Done, Tries int64 }

func (p *place) isBack() {
	if p.done.CompareAndSwap(0, time.Now().UnixNano()) {
		p.load.back.Add(1)
	}
}

// spread is the time over which clients connect first, for each of them.
const spread = 3 * time.Millisecond

func serveLoad(ctx context.Context, cancel func(), in io.Reader, out io.Writer,
	start func(ctx context.Context, n node, p *place) error,
) error {
	l := &load{}
	err := process.Serve(ctx, in, out, process.Verbs{
		"start": process.With(func(_ context.Context, cfg loadConfig) (any, error) {
			return nil, l.start(ctx, cfg, start)
		}),
		"mark":  func(context.Context, json.RawMessage) (any, error) { l.mark(); return nil, nil },
		"back":  func(context.Context, json.RawMessage) (any, error) { return l.back.Load(), nil },
		"times": func(context.Context, json.RawMessage) (any, error) { return l.times(), nil },
	})
	cancel()
	l.wg.Wait()
	return err
}

// start starts the clients of a file beside those that run.
func (l *load) start(ctx context.Context, cfg loadConfig, start func(ctx context.Context, n node, p *place) error,
) error {
	text, err := os.ReadFile(cfg.Enrolled)
	if err != nil {
		return fmt.Errorf("read the nodes: %w", err)
	}
	fleet := &enrolled{}
	if err := json.Unmarshal(text, fleet); err != nil {
		return fmt.Errorf("read the nodes: %w", err)
	}
	if len(cfg.Addrs) == 0 {
		return errors.New("no address to connect to")
	}
	places := make([]*place, 0, len(fleet.Nodes))
	for range fleet.Nodes {
		places = append(places, &place{load: l, fleet: fleet, addrs: cfg.Addrs})
	}
	l.places = append(l.places, places...)
	l.wg.Go(func() {
		for i, n := range fleet.Nodes {
			if !app.Sleep(ctx, spread) || start(ctx, n, places[i]) != nil {
				return // the bench sees that not all are connected
			}
		}
	})
	return nil
}

// mark forgets who is back.
func (l *load) mark() {
	for _, p := range l.places {
		p.done.Store(0)
		p.tries.Store(0)
	}
	l.back.Store(0)
}

func (l *load) times() []comeback {
	out := make([]comeback, 0, len(l.places))
	for _, p := range l.places {
		out = append(out, comeback{Dialled: p.dialled.Load(), Done: p.done.Load(), Tries: p.tries.Load()})
	}
	return out
}
