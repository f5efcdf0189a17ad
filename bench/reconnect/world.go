package reconnect

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/gpuaas/mesh/bench/process"
	"github.com/gpuaas/mesh/bench/rig"
	"github.com/gpuaas/mesh/internal/config"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/ports"
	"github.com/gpuaas/mesh/mesh/cluster"
	"github.com/gpuaas/mesh/mesh/material"
)

// soon bounds a request to a child that does little.
const soon = time.Minute

// world is the mesh with the agents, and the bare clients and servers beside it.
type world struct {
	opts    Options
	dir     string
	cluster *cluster.Cluster
	db      *rig.Rig
	details map[string]any

	replicas []string // where the replicas of nodeapi listen
	bareAt   []string // where the bare servers listen, as many
	agents   *process.Child
	clients  *process.Child   // the bare ones
	bare     []*process.Child // servers
	log      *eventLog
	faultAt  time.Time // of the first kill
}

// while starts the mesh, runs do, and ends everything.
func (w *world) while(ctx context.Context, do func(context.Context) error) error {
	programs := w.opts.Programs
	if programs == "" {
		self, err := os.Executable()
		if err != nil {
			return fmt.Errorf("find own program: %w", err)
		}
		programs = filepath.Dir(self)
	}
	c, err := cluster.New(ctx, w.opts.Logger, cluster.Config{
		Dir: w.dir, Programs: programs, CacheDir: w.opts.CacheDir, Replicas: w.opts.Replicas, LogLevel: "warn",
		Statements: true,
	})
	if err != nil {
		return fmt.Errorf("build the mesh: %w", err)
	}
	w.cluster = c
	kept, cancel := context.WithCancel(context.WithoutCancel(ctx))
	var keeping sync.WaitGroup
	var keepErr error
	keeping.Go(func() { keepErr = c.Keep(kept) })
	defer w.stopChildren()
	if err = c.Start(ctx); err == nil {
		err = do(ctx)
	}
	if err != nil {
		err = errors.Join(err, fmt.Errorf("the services' logs end with:\n%s", c.Tails(8)))
	}
	if w.db != nil {
		w.db.Close(ctx)
	}
	w.stopChildren()
	cancel()
	keeping.Wait()
	return errors.Join(err, keepErr, c.Close(context.WithoutCancel(ctx)))
}

// stopChildren ends the agents and the bare processes.
func (w *world) stopChildren() {
	for _, c := range append([]*process.Child{w.agents, w.clients}, w.bare...) {
		if c != nil {
			c.Stop()
		}
	}
	w.agents, w.clients, w.bare = nil, nil, nil
}

// connect enrols the agents, starts them and the bare clients, and waits until all are connected.
func (w *world) connect(ctx context.Context) error {
	url, err := config.SecretFile(w.cluster.Material.URLFile(pg.RoleOwner)).Read()
	if err != nil {
		return fmt.Errorf("read the address of the database: %w", err)
	}
	if w.db, err = rig.Open(ctx, url.Reveal(), 2); err != nil {
		return err
	}
	w.details = w.db.Details
	if w.replicas, err = w.cluster.Replicas(w.cluster.Plan.Addresses.Agents); err != nil {
		return err
	}
	if w.bareAt, err = ports.Free(ctx, w.opts.Replicas); err != nil {
		return err
	}
	for range w.opts.Replicas {
		if err := w.startBare(ctx, len(w.bare), 0); err != nil {
			return err
		}
	}
	if w.agents, err = process.Start(w.opts.Command, childAgents); err != nil {
		return err
	}
	if w.clients, err = process.Start(w.opts.Command, childClients); err != nil {
		return err
	}
	began := time.Now()
	for from := 0; from < w.opts.Agents; from += part {
		if err := w.add(ctx, from, min(part, w.opts.Agents-from)); err != nil {
			return err
		}
	}
	w.say("%d nodes enrolled in %.1f s", w.opts.Agents, time.Since(began).Seconds())
	for name, load := range map[string]*process.Child{"agents": w.agents, "bare clients": w.clients} {
		if n, err := load.Await(ctx, within, "back", w.opts.Agents); err != nil {
			return fmt.Errorf("%d of %d %s are connected: %w", n, w.opts.Agents, name, err)
		}
	}
	w.details["connected_in_s"] = round(time.Since(began).Seconds())
	w.say("all connected after %.1f s", time.Since(began).Seconds())
	return nil
}

// part is how many nodes enrol before they connect: a node that has enrolled and does not connect is called down.
const part = 128

// add enrols some agents, and starts them and their bare clients.
func (w *world) add(ctx context.Context, from, n int) error {
	list, err := w.enrol(ctx, from, n)
	if err != nil {
		return err
	}
	file := filepath.Join(w.dir, fmt.Sprintf("enrolled-%d.json", from))
	text, err := json.Marshal(list)
	if err != nil {
		return fmt.Errorf("write the nodes: %w", err)
	}
	if err := os.WriteFile(file, text, 0o600); err != nil {
		return fmt.Errorf("write the nodes: %w", err)
	}
	if err := w.agents.Ask(ctx, soon, "start", loadConfig{Enrolled: file, Addrs: w.replicas}, nil); err != nil {
		return err
	}
	return w.clients.Ask(ctx, soon, "start", loadConfig{Enrolled: file, Addrs: w.bareAt}, nil)
}

// startBare starts the i-th bare server, and has it listen after a while.
func (w *world) startBare(ctx context.Context, i int, after time.Duration) error {
	began := time.Now()
	server, err := process.Start(w.opts.Command, childServer)
	if err != nil {
		return err
	}
	if i < len(w.bare) {
		w.bare[i] = server
	} else {
		w.bare = append(w.bare, server)
	}
	if err := w.pause(ctx, time.Until(began.Add(after))); err != nil {
		return err
	}
	m := w.cluster.Material
	return server.Ask(ctx, soon, "listen", serverConfig{
		Addr: w.bareAt[i], Identity: m.Identity(material.NodeAPI), NodeRoots: m.NodeRoots(),
		TrustDomain: cluster.TrustDomain,
	}, nil)
}
