package tasks

import (
	"context"
	"crypto/ed25519"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/gpuaas/mesh/bench/pending"
	"github.com/gpuaas/mesh/bench/process"
	"github.com/gpuaas/mesh/bench/rig"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1/lifecyclev1connect"
	"github.com/gpuaas/mesh/internal/config"
	"github.com/gpuaas/mesh/internal/envelope"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/joinstate"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/rpc/assertion"
	"github.com/gpuaas/mesh/internal/rpc/port"
	"github.com/gpuaas/mesh/services/lifecycle/gate"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
	"github.com/gpuaas/mesh/services/lifecycle/task/dispatch"
	"github.com/gpuaas/mesh/services/nodeapi"
	"github.com/gpuaas/mesh/services/nodeapi/nodeapitest"
)

// cluster is a mesh for tasks: lifecycle's part of it, nodeapi, and agents.
type cluster struct {
	opts   Options
	dir    string
	pool   *pgxpool.Pool
	hub    *dispatch.Hub
	tasks  *dispatch.Server
	gates  *gate.Server
	wake   *events.Signal
	nodes  []node
	agents *process.Child
	done   atomic.Int64
	close  func()

	ends *pending.Units[string] // acknowledgements of tasks
}

type noInstance struct{}

func (noInstance) SessionReady(context.Context, pgx.Tx, gate.Gate) error { return nil }

func (noInstance) RegisterFailures(context.Context, pgx.Tx, string, int64, int32, string) error {
	return nil
}

// conns is the size of lifecycle's pool: as many as the baseline has clients.
const conns = rig.RateClients

// start brings everything up; the returned function ends it, and is never nil.
func (r *cluster) start(ctx context.Context) (func(), error) {
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	var pools []*pgxpool.Pool
	stop := func() {
		if r.agents != nil {
			r.agents.Stop()
		}
		cancel()
		wg.Wait()
		for _, p := range pools {
			p.Close()
		}
	}
	run := func(name string, f func(context.Context) error) {
		wg.Go(func() {
			if err := f(ctx); err != nil && ctx.Err() == nil {
				r.opts.Logger.ErrorContext(ctx, "bench part ended", slog.String("part", name), slog.Any("error", err))
			}
		})
	}
	open := func(role string, conns int32, settings map[string]string) (*pgxpool.Pool, error) {
		p, err := pg.Open(ctx, pg.Config{
			URL: r.opts.Database.URL(role), ApplicationName: "bench " + role, MaxConns: conns, MinConns: conns,
			Settings: settings,
		})
		if err != nil {
			return nil, fmt.Errorf("open database: %w", err)
		}
		pools = append(pools, p)
		return p, nil
	}
	var err error
	if r.pool, err = open(pg.RoleLifecycle, conns, saga.PoolSettings()); err != nil {
		return stop, err
	}
	sequencerPool, err := open(pg.RoleSequencer, 2, nil)
	if err != nil {
		return stop, err
	}
	nodes, err := nodeapitest.NewAuthority("nodes")
	if err != nil {
		return stop, err
	}
	services, err := nodeapitest.NewAuthority("services")
	if err != nil {
		return stop, err
	}
	backend, err := nodeapitest.NewBackend()
	if err != nil {
		return stop, err
	}
	recovery, _, err := backend.Listen(ctx, r.opts.Logger, services)
	if err != nil {
		return stop, err
	}
	run("plane", backend.Run)
	key, lifecycle, err := r.lifecycle(ctx, run, backend, services, sequencerPool)
	if err != nil {
		return stop, err
	}
	addr, err := r.nodeapi(ctx, run, nodes, services, recovery, lifecycle)
	if err != nil {
		return stop, err
	}
	if err := r.admit(ctx); err != nil {
		return stop, err
	}
	return stop, r.bring(ctx, run, addr, key, nodes, services)
}

// lifecycle serves gates and tasks as the service does.
func (r *cluster) lifecycle(ctx context.Context, run func(string, func(context.Context) error),
	backend *nodeapitest.Backend, services *nodeapitest.Authority,
	sequencerPool *pgxpool.Pool,
) (envelope.Key, string, error) {
	_, private, err := ed25519.GenerateKey(nil)
	if err != nil {
		return envelope.Key{}, "", fmt.Errorf("make task key: %w", err)
	}
	key := envelope.NewKey(private)
	public, err := backend.Keys.Public()
	if err != nil {
		return key, "", err
	}
	verifier, err := joinstate.NewVerifier(public)
	if err != nil {
		return key, "", err
	}
	numbered := &events.Signal{}
	r.wake = &events.Signal{}
	sequencer, err := events.NewSequencer(events.SequencerDeps{
		Pool: sequencerPool, Wake: r.wake, Numbered: numbered,
		Logger: r.opts.Logger,
	}, events.SequencerConfig{})
	if err != nil {
		return key, "", fmt.Errorf("make sequencer: %w", err)
	}
	run("sequencer", sequencer.Run)
	r.hub = dispatch.NewHub(r.opts.Logger, r.pool, numbered)
	run("hub", r.hub.Run)
	r.tasks = dispatch.NewServer(dispatch.Deps{
		Logger: r.opts.Logger, DB: r.pool, Key: key, Hub: r.hub, Committed: r.wake.Notify,
		Wake: func(context.Context, pgx.Tx, ...string) error { return nil },
	})
	r.gates = gate.NewServer(gate.Deps{
		Logger: r.opts.Logger, DB: r.pool, Join: verifier, Tasks: r.tasks,
		Instances: noInstance{}, Committed: r.wake.Notify, Slots: 1,
	})
	store, err := services.Service("lifecycle")
	if err != nil {
		return key, "", err
	}
	roots, err := services.Bundle()
	if err != nil {
		return key, "", err
	}
	srv, err := port.New(ctx, port.Deps{Logger: r.opts.Logger, Persons: assertion.NewVerifier(public, nil)},
		port.Config{
			Name: "internal", Addr: "127.0.0.1:0", MaxReadBytes: 8 << 20,
			TLS: pki.ServerConfig{
				Store: store, TrustDomain: nodeapitest.TrustDomain,
				Clients: []pki.Trust{{Kind: pki.KindService, Bundle: roots}},
			},
		})
	if err != nil {
		return key, "", fmt.Errorf("open lifecycle's port: %w", err)
	}
	path, h := lifecyclev1connect.NewGateServiceHandler(r.gates, srv.HandlerOptions()...)
	err = srv.Mount(path, h)
	path, h = lifecyclev1connect.NewTaskServiceHandler(r.tasks, srv.HandlerOptions()...)
	if err = errors.Join(err, srv.Mount(path, h)); err != nil {
		return key, "", fmt.Errorf("mount lifecycle: %w", err)
	}
	run("lifecycle", srv.Run)
	return key, srv.Addr().String(), nil
}

func (r *cluster) nodeapi(ctx context.Context, run func(string, func(context.Context) error), nodes,
	services *nodeapitest.Authority, recovery, lifecycle string,
) (string, error) {
	files, err := nodeapitest.WriteFiles(r.dir, "nodeapi", nodes, services)
	if err != nil {
		return "", err
	}
	cfg := nodeapi.Default()
	cfg.TrustDomain = nodeapitest.TrustDomain
	for role, file := range map[string]*config.SecretFile{
		pg.RoleNodeAPI:   &cfg.DatabaseURLFile,
		pg.RoleSequencer: &cfg.SequencerURLFile,
	} {
		*file = config.SecretFile(filepath.Join(r.dir, role))
		if err := os.WriteFile(string(*file), []byte(r.opts.Database.URL(role)), 0o600); err != nil {
			return "", fmt.Errorf("write database url: %w", err)
		}
	}
	cfg.TLS.CertFile, cfg.TLS.KeyFile, cfg.TLS.CAFile, cfg.NodeCAFile = files.Cert, files.Key, files.ServiceCA,
		files.NodeCA
	cfg.Peers.Recovery, cfg.Peers.Lifecycle = recovery, lifecycle
	cfg.DrainTimeout = time.Second
	registry, err := obs.NewRegistry()
	if err != nil {
		return "", fmt.Errorf("make registry: %w", err)
	}
	s, err := nodeapi.New(ctx, nodeapi.Deps{Logger: r.opts.Logger, Registry: registry}, cfg)
	if err != nil {
		return "", fmt.Errorf("build nodeapi: %w", err)
	}
	run("nodeapi", s.Run)
	return s.AgentAddr(), nil
}

// admit makes the gates of the nodes, as recovery would after their enrolment.
func (r *cluster) admit(ctx context.Context) error {
	for i := range r.opts.Agents {
		n := node{ID: ids.New(), Instance: ids.New()}
		_, err := r.gates.ApplyFence(ctx,
			&lifecyclev1.ApplyFenceRequest{
				NodeId: n.ID, NodeInstanceId: n.Instance, Name: fmt.Sprintf("bench-%d", i),
				FenceEpoch: 1, Admitted: true,
			})
		if err != nil {
			return fmt.Errorf("admit node: %w", err)
		}
		r.nodes = append(r.nodes, n)
	}
	return nil
}

// bring starts the agents and waits until all are admitted.
func (r *cluster) bring(ctx context.Context, run func(string, func(context.Context) error), addr string,
	key envelope.Key, nodes, services *nodeapitest.Authority,
) error {
	lis, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return fmt.Errorf("listen for acknowledgements: %w", err)
	}
	run("acks", func(ctx context.Context) error { return r.hear(ctx, lis) })
	if r.agents, err = process.Start(r.opts.Command, childAgents); err != nil {
		return err
	}
	set, err := envelope.NewVerifierSet(key.Public())
	if err != nil {
		return fmt.Errorf("make verifiers: %w", err)
	}
	cfg := agentsConfig{Addr: addr, Acks: lis.Addr().String(), Dir: r.dir, Nodes: r.nodes, Verifiers: set.String()}
	if cfg.Trust, err = nodes.Encode(); err != nil {
		return err
	}
	if cfg.Services, err = services.Encode(); err != nil {
		return err
	}
	if err := r.agents.Ask(ctx, 2*time.Minute, "start", cfg, nil); err != nil {
		return err
	}
	_, err = r.agents.Await(ctx, 2*time.Minute, "admitted", len(r.nodes))
	return err
}

// hear receives the acknowledged results from the agents' process, stamped there; both clocks are this host's.
func (r *cluster) hear(ctx context.Context, lis net.Listener) error {
	defer context.AfterFunc(ctx, func() { _ = lis.Close() })()
	conn, err := lis.Accept()
	if err != nil {
		return fmt.Errorf("accept: %w", err)
	}
	defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
	var record [8 + 36]byte
	for {
		if _, err := io.ReadFull(conn, record[:]); err != nil {
			return nil // the agents have ended
		}
		// nanoseconds since 1970
		r.ends.Ended(string(record[8:]), time.Unix(0, int64(binary.BigEndian.Uint64(record[:8]))))
	}
}
