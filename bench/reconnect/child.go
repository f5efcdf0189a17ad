package reconnect

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"os"
	"runtime/debug"
	"strings"
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

	mu     sync.Mutex
	failed map[string]int // tries that failed since the last mark, by what was said of them
}

// place holds how one client came back since the last mark.
type place struct {
	load    *load
	fleet   *enrolled
	addrs   []string
	dialled atomic.Int64 // the last time; nanoseconds since 1970
	done    atomic.Int64 // zero: it is not back
	worked  atomic.Int64 // when its gate was up; zero: it is not
	tries   atomic.Int64
}

// comeback is how one client came back. Dialled is when the connection was begun that stands, Worked when an agent
// could be given work again.
type comeback struct{ Dialled, Done, Worked, Tries int64 }

// failedWith counts a try that failed.
func (p *place) failedWith(text string) {
	p.load.mu.Lock()
	defer p.load.mu.Unlock()
	p.load.failed[kindOf(text)]++
}

// kindOf returns the text of an error without addresses, and without what was called in between.
func kindOf(text string) string {
	text, _, _ = strings.Cut(text, "\n")
	text, _, _ = strings.Cut(text, " from ") // an address
	parts := strings.Split(text, ": ")
	first, last := parts[0], parts[len(parts)-1]
	if len(parts) == 1 || strings.Contains(first, "tcp ") {
		return last
	}
	return first + ": " + last
}

func (p *place) isBack() {
	if p.done.CompareAndSwap(0, time.Now().UnixNano()) {
		p.load.back.Add(1)
	}
}

// gcPercent is that of agents and of bare clients.
const gcPercent = 400

// spread is the time over which clients connect first, for each of them.
const spread = 3 * time.Millisecond

func serveLoad(ctx context.Context, cancel func(), in io.Reader, out io.Writer,
	start func(ctx context.Context, n node, p *place) error,
) error {
	l := &load{failed: map[string]int{}}
	// Thousands of clients share this heap, as on no host: its garbage is not to be part of what is measured.
	debug.SetGCPercent(gcPercent)
	err := process.Serve(ctx, in, out, process.Verbs{
		"start": process.With(func(_ context.Context, cfg loadConfig) (any, error) {
			return nil, l.start(ctx, cfg, start)
		}),
		"mark":   func(context.Context, json.RawMessage) (any, error) { l.mark(); return nil, nil },
		"back":   func(context.Context, json.RawMessage) (any, error) { return l.back.Load(), nil },
		"failed": func(context.Context, json.RawMessage) (any, error) { return l.failures(), nil },
		"times":  func(context.Context, json.RawMessage) (any, error) { return l.times(), nil },
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
		p.worked.Store(0)
	}
	l.back.Store(0)
	l.mu.Lock()
	defer l.mu.Unlock()
	clear(l.failed)
}

func (l *load) failures() map[string]int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return maps.Clone(l.failed)
}

func (l *load) times() []comeback {
	out := make([]comeback, 0, len(l.places))
	for _, p := range l.places {
		out = append(out, comeback{
			Dialled: p.dialled.Load(), Done: p.done.Load(), Worked: p.worked.Load(), Tries: p.tries.Load(),
		})
	}
	return out
}
