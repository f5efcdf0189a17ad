// Command peers runs other engines for `gpuaas bench peers`, each in a process of its own: DBOS Transact and River.
//
// It is a module of its own, so that none of their dependencies is one of the product's. It reads requests as lines of
// JSON on its stdin and answers each with one on its stdout, as every child of a bench does.
package main

import (
	"context"
	"fmt"
	"net/url"
	"os"
	"runtime/debug"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/bench/beside/peer"
	"github.com/gpuaas/mesh/bench/process"
)

// engine is one of the peers.
type engine interface {
	// start makes the engine's tables in a database and starts its workers.
	start(ctx context.Context, databaseURL string, setup peer.Setup) (peer.Described, error)
	// stretch begins units for a length of time and returns when the last of them is done.
	stretch(ctx context.Context, load peer.Load) (peer.Stretch, error)
	stop()
}

func main() {
	engines := map[string]engine{"dbos": &dbosEngine{}, "river": &riverEngine{}}
	if len(os.Args) != 2 || engines[os.Args[1]] == nil {
		fmt.Fprintln(os.Stderr, "usage: peers dbos|river")
		os.Exit(2)
	}
	if err := serve(engines[os.Args[1]]); err != nil {
		fmt.Fprintln(os.Stderr, "peers: "+err.Error())
		os.Exit(1)
	}
}

func serve(e engine) error {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	defer e.stop()
	return process.Serve(ctx, os.Stdin, os.Stdout, process.Verbs{
		"start": process.With(func(ctx context.Context, setup peer.Setup) (any, error) {
			at, err := makeDatabase(ctx, setup)
			if err != nil {
				return nil, err
			}
			return e.start(ctx, at, setup)
		}),
		"stretch": process.With(func(ctx context.Context, load peer.Load) (any, error) { return e.stretch(ctx, load) }),
	})
}

// makeDatabase makes the engine's database and returns its connection string.
func makeDatabase(ctx context.Context, setup peer.Setup) (string, error) {
	at, err := url.Parse(setup.AdminURL)
	if err != nil {
		return "", fmt.Errorf("read database url: %w", err)
	}
	conn, err := pgx.Connect(ctx, setup.AdminURL)
	if err != nil {
		return "", fmt.Errorf("connect: %w", err)
	}
	defer func() { _ = conn.Close(ctx) }()
	if _, err := conn.Exec(ctx, "CREATE DATABASE "+pgx.Identifier{setup.Database}.Sanitize()); err != nil {
		return "", fmt.Errorf("make database %s: %w", setup.Database, err)
	}
	at.Path = "/" + setup.Database
	return at.String(), nil
}

// version returns the version of a module that this program was built with.
func version(module string) string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	for _, m := range info.Deps {
		if m.Path == module {
			return m.Version
		}
	}
	return "unknown"
}

// timings collects how long units took.
type timings struct {
	mu   sync.Mutex
	took []time.Duration
	last time.Time // when the last of them ended
}

func (t *timings) add(began, ended time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.took = append(t.took, ended.Sub(began))
	if ended.After(t.last) {
		t.last = ended
	}
}

// stretch returns the result of units of which the first began at a time.
func (t *timings) stretch(began time.Time) peer.Stretch {
	t.mu.Lock()
	defer t.mu.Unlock()
	slices.Sort(t.took)
	at := func(p float64) float64 {
		if len(t.took) == 0 {
			return 0
		}
		return float64(t.took[min(int(p*float64(len(t.took))), len(t.took)-1)].Microseconds()) / 1000
	}
	s := peer.Stretch{Units: len(t.took), P50: at(.5), P99: at(.99)}
	if s.Units > 0 {
		s.Took = t.last.Sub(began)
	}
	return s
}
