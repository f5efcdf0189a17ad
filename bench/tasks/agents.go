package tasks

import (
	"bufio"
	"context"
	"crypto/tls"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"path/filepath"
	"sync"
	"time"

	"github.com/gpuaas/mesh/agent/clock"
	"github.com/gpuaas/mesh/agent/identity"
	"github.com/gpuaas/mesh/agent/ledger"
	"github.com/gpuaas/mesh/agent/session"
	"github.com/gpuaas/mesh/agent/session/memory"
	"github.com/gpuaas/mesh/agent/task"
	"github.com/gpuaas/mesh/bench/process"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/envelope"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/services/nodeapi/nodeapitest"
)

// childAgents is the load: agents with a session, an executor and a ledger on disk each.
const childAgents = "tasks-agents"

// agentsConfig is the configuration of the load.
type agentsConfig struct {
	Addr, Acks, Dir string
	Nodes           []node
	Verifiers       string
	Trust, Services []byte
}

type node struct{ ID, Instance string }

// Child serves a child process of this bench, until in ends; false if the kind is not one of its own.
func Child(ctx context.Context, kind string, in io.Reader, out io.Writer, logger *slog.Logger) (bool, error) {
	if kind != childAgents {
		return false, nil
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	f := &fleet{logger: logger}
	err := process.Serve(ctx, in, out, process.Verbs{
		"start": process.With(func(_ context.Context, cfg agentsConfig) (any, error) {
			return nil, f.start(ctx, cfg)
		}),
		"admitted": func(context.Context, json.RawMessage) (any, error) { return f.admitted(), nil },
		"ledgers":  func(context.Context, json.RawMessage) (any, error) { return f.ledgers(), nil },
		"bbolt":    process.With(func(_ context.Context, args bboltConfig) (any, error) { return bboltRate(args) }),
	})
	cancel()
	return true, errors.Join(err, f.wait())
}

type fleet struct {
	logger *slog.Logger
	acks   *acks
	agents []*agent
	wg     sync.WaitGroup
}

type agent struct {
	client   *session.Client
	executor *task.Executor
	ledger   *ledger.Ledger
}

// acks sends the bench the acknowledged results: the time and the task's id, 44 bytes each.
type acks struct {
	mu   sync.Mutex
	out  *bufio.Writer
	conn net.Conn
	wake chan struct{}
}

func (a *acks) add(refs []*nodev1.TaskRef) {
	now := uint64(time.Now().UnixNano())
	a.mu.Lock()
	for _, r := range refs {
		_, _ = a.out.Write(append(binary.BigEndian.AppendUint64(nil, now), r.GetTaskId()...))
	}
	a.mu.Unlock()
	select {
	case a.wake <- struct{}{}:
	default:
	}
}

// run flushes the buffer: many records in one write when there are many.
func (a *acks) run(ctx context.Context) {
	for {
		select {
		case <-a.wake:
		case <-ctx.Done():
			_ = a.conn.Close()
			return
		}
		a.mu.Lock()
		_ = a.out.Flush()
		a.mu.Unlock()
	}
}

func (f *fleet) start(ctx context.Context, cfg agentsConfig) error {
	conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", cfg.Acks)
	if err != nil {
		return fmt.Errorf("reach the bench: %w", err)
	}
	f.acks = &acks{out: bufio.NewWriterSize(conn, 1<<16), conn: conn, wake: make(chan struct{}, 1)}
	f.wg.Go(func() { f.acks.run(ctx) })
	nodes, err := nodeapitest.DecodeAuthority(cfg.Trust)
	if err != nil {
		return err
	}
	services, err := nodeapitest.DecodeAuthority(cfg.Services)
	if err != nil {
		return err
	}
	roots, err := services.Bundle()
	if err != nil {
		return err
	}
	set, err := envelope.ParseVerifierSet(cfg.Verifiers)
	if err != nil {
		return err
	}
	for _, n := range cfg.Nodes {
		cert, err := nodes.Node(n.ID)
		if err != nil {
			return err
		}
		if err := f.one(ctx, cfg, n, &cert, roots, set); err != nil {
			return fmt.Errorf("start agent: %w", err)
		}
	}
	return nil
}

func (f *fleet) one(ctx context.Context, cfg agentsConfig, n node, cert *tls.Certificate, roots *pki.Bundle,
	set *envelope.VerifierSet,
) error {
	a := &agent{}
	var err error
	if a.ledger, err = ledger.Open(ledger.Config{Path: filepath.Join(cfg.Dir, n.ID+".db")}); err != nil {
		return err
	}
	clk := clock.New(0)
	boot := ids.New()
	a.executor, err = task.New(task.Deps{
		Logger: f.logger, Ledger: a.ledger, Verifiers: func() *envelope.VerifierSet { return set }, ServerNow: clk.Server,
		Handlers: handlers(boot),
	}, task.Config{NodeID: n.ID, DefaultConcurrency: 16})
	if err != nil {
		return err
	}
	a.client, err = session.New(session.Deps{
		Logger: f.logger, Clock: clk, Roots: roots, Endpoint: func() (string, error) { return cfg.Addr, nil },
		Identity: memory.New(identity.Node{NodeID: n.ID, InstanceID: n.Instance, TrustDomain: nodeapitest.TrustDomain},
			cert),
		Hooks: session.Hooks{
			Hello: func(h *nodev1.Hello) {
				h.LedgerId, h.BootId, h.AgentVersion = a.ledger.ID(), boot, "bench"
				h.TaskTypes, h.TasksInFlight = a.executor.Types(), a.executor.InFlight()
			},
			Admitted: func(context.Context, int64) { a.executor.Attach(a.client) },
			Lost:     func() { a.executor.Detach(a.client) },
			Offer:    a.executor.Offer,
			Cancel:   a.executor.Cancel,
			Acknowledged: func(ctx context.Context, refs []*nodev1.TaskRef) error {
				f.acks.add(refs)
				return a.executor.Ack(ctx, refs)
			},
		},
	}, session.Config{})
	if err != nil {
		return err
	}
	f.agents = append(f.agents, a)
	f.wg.Go(func() { _ = a.executor.Run(ctx) })
	f.wg.Go(func() {
		if err := a.client.Run(ctx); err != nil && ctx.Err() == nil {
			f.logger.ErrorContext(ctx, "bench agent ended", slog.Any("error", err))
		}
	})
	return nil
}

// handlers returns those of the product's agent for the tasks of this bench. A probe may run again after a restart, and
// so the agent reports its delivery and its start with its result.
func handlers(boot string) map[commonv1.TaskType]task.Handler {
	const probe = commonv1.TaskType_TASK_TYPE_PROBE_NOOP
	return map[commonv1.TaskType]task.Handler{probe: task.Handlers(task.HandlerDeps{BootID: boot})[probe]}
}

func (f *fleet) admitted() int {
	n := 0
	for _, a := range f.agents {
		if a.client.Generation() != 0 {
			n++
		}
	}
	return n
}

// ledgerStats are the commits of all ledgers, with their writes and fsyncs.
type ledgerStats struct{ Commits, Writes, Fsyncs int64 }

func (f *fleet) ledgers() ledgerStats {
	var s ledgerStats
	for _, a := range f.agents {
		one := a.ledger.Stats()
		s.Commits, s.Writes, s.Fsyncs = s.Commits+one.Commits, s.Writes+one.Writes, s.Fsyncs+one.Fsyncs
	}
	return s
}

func (f *fleet) wait() error {
	f.wg.Wait()
	errs := make([]error, 0, len(f.agents))
	for _, a := range f.agents {
		errs = append(errs, a.ledger.Close())
	}
	return errors.Join(errs...)
}
