package nodeapi

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1/lifecyclev1connect"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/gen/gpuaas/node/v1/nodev1connect"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/gen/gpuaas/recovery/v1/recoveryv1connect"
	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/internal/rpc/port"
	"github.com/gpuaas/mesh/internal/service"
	"github.com/gpuaas/mesh/services/nodeapi/authority"
	"github.com/gpuaas/mesh/services/nodeapi/facts"
	"github.com/gpuaas/mesh/services/nodeapi/relay"
	"github.com/gpuaas/mesh/services/nodeapi/roster"
	"github.com/gpuaas/mesh/services/nodeapi/session"
	"github.com/gpuaas/mesh/services/nodeapi/work"
)

// Deps of the service.
type Deps struct {
	Logger   *slog.Logger
	Registry *obs.Registry
	// Numbering is shared by the services of one process; nil: the service makes its own.
	Numbering *service.Numbering
}

// Service is one replica of nodeapi.
type Service struct {
	base   *service.Base
	cfg    Config
	lis    net.Listener
	server *session.Server
	roster *roster.Roster
	facts  *facts.Writer
	// internal serves the calls of other services.
	internal *port.Server
}

// New builds a replica. It listens, and serves nothing before Run.
func New(ctx context.Context, deps Deps, cfg Config) (*Service, error) {
	base, err := service.New(ctx, deps.Logger, deps.Registry, "nodeapi", cfg.Config, service.WithNumbering(deps.Numbering))
	if err != nil {
		return nil, err
	}
	s := &Service{base: base, cfg: cfg}
	if err := s.build(ctx); err != nil {
		if s.lis != nil {
			_ = s.lis.Close()
		}
		base.Close()
		return nil, fmt.Errorf("build nodeapi: %w", err)
	}
	return s, nil
}

// late passes facts to the writer, which is built after the roster that reports them.
type late struct{ to *facts.Writer }

// Session reports a fact.
func (l *late) Session(f *nodev1.SessionChanged) { l.to.Session(f) }

func (s *Service) build(ctx context.Context) error {
	b := s.base
	nodes, err := pki.LoadBundle(s.cfg.NodeCAFile)
	if err != nil {
		return fmt.Errorf("load nodes' issuer: %w", err)
	}
	b.Watch(nodes)
	clock := &session.Clock{}
	tlsConfig, err := pki.ServerTLS(pki.ServerConfig{
		Store: b.Store, TrustDomain: b.Config.TrustDomain, NextProtos: []string{"h2"}, Time: clock.Now,
		Clients: []pki.Trust{{Kind: pki.KindNode, Bundle: nodes}},
	})
	if err != nil {
		return fmt.Errorf("build agents' TLS: %w", err)
	}
	rc, err := b.Peer("recovery", s.cfg.Peers.Recovery, nil)
	if err != nil {
		return err
	}
	lc, err := b.Peer("lifecycle", s.cfg.Peers.Lifecycle, nil)
	if err != nil {
		return err
	}
	recovery := recoveryv1connect.NewSessionServiceClient(rc.HTTP, rc.BaseURL, rc.Options...)
	tasks := lifecyclev1connect.NewTaskServiceClient(lc.HTTP, lc.BaseURL, lc.Options...)
	gates := lifecyclev1connect.NewGateServiceClient(lc.HTTP, lc.BaseURL, lc.Options...)

	events := &late{}
	s.roster = roster.New(b.Logger, roster.Config{
		ReplicaID: b.ReplicaID, Offset: clock.Offset,
		StaleAfter: func() time.Duration { return b.Policy.Current().HeartbeatStaleAfter() },
	}, events)
	m, err := newMetrics(b.Registry.ForService(b.Name), func() float64 { return float64(s.roster.Open()) })
	if err != nil {
		return err
	}
	taskKeys, serviceRoots := &session.KeyList{}, &session.RootList{}
	joins, err := s.openKeys(ctx, taskKeys, serviceRoots)
	if err != nil {
		return err
	}
	var dispatcher *work.Dispatcher
	view := authority.New(b.Logger, authority.Config{ReplicaID: b.ReplicaID, RetiredFor: s.cfg.RetiredFor},
		func(ctx context.Context) (authority.Stream, error) { return recovery.WatchAuthority(ctx) },
		func(n *recoveryv1.NodeAuthority) {
			s.roster.OnAuthority(n)
			dispatcher.Mark(n.GetNodeId())
		})
	streamed := work.NewStream(b.Logger, tasks,
		func(ctx context.Context) (work.Connection, error) { return tasks.StreamWork(ctx) })
	dispatcher = work.NewDispatcher(b.Logger, b.ReplicaID, s.roster, view, streamed,
		func(ctx context.Context, replica string) (work.Hints, error) {
			return tasks.WatchWork(ctx, &lifecyclev1.WatchWorkRequest{ReplicaId: replica})
		}, m)
	streamed.OnOffer(dispatcher.Offer)
	outputs := relay.New(relay.Deps{Logger: b.Logger, Session: func(nodeID string) relay.Session {
		sess := s.roster.Current(nodeID)
		if sess == nil || !view.MayDispatch(nodeID, sess.ID, sess.Generation()) {
			return nil
		}
		return sess
	}})
	if s.internal, err = b.InternalServer(ctx, nil); err != nil {
		return err
	}
	if err := s.internal.Mount(nodev1connect.NewRelayServiceHandler(outputs, s.internal.HandlerOptions()...)); err != nil {
		return fmt.Errorf("mount services: %w", err)
	}
	address, err := advertised(s.cfg.Advertise, s.internal.Addr().String())
	if err != nil {
		return err
	}
	reporter := work.NewReporter(b.Logger, b.ReplicaID, view, streamed, m)
	s.server, err = session.New(session.Deps{
		Logger: b.Logger, Roster: s.roster, View: view, Work: both{reporter, dispatcher}, Authority: recovery, Gate: gates,
		Metrics: m,
		Observe: func(sess *roster.Session, o *nodev1.Observation) {
			s.facts.Observed(sess.Identity.NodeID, sess.InstanceID(), sess.Generation(), o)
		},
		Output: func(sess *roster.Session, chunk *nodev1.OutputChunk) { outputs.Chunk(sess.Identity.NodeID, chunk) },
		Gone: func(sess *roster.Session) {
			outputs.Gone(sess.Identity.NodeID, sess)
			streamed.Ended(sess.Identity.NodeID, sess.ID)
		},
		Diagnose: func(sess *roster.Session, d []*commonv1.Diagnostic) { s.facts.Session(sess.Diagnosed(d)) },
		Host:     func(sess *roster.Session, host *commonv1.HostFacts) { s.facts.Session(sess.HostChanged(host)) },
		Policy:   func() *commonv1.NodePolicy { return nodePolicy(b.Policy.Current(), s.roster.Open()) },
	}, session.Config{
		ReplicaID: b.ReplicaID, TrustDomain: b.Config.TrustDomain, TLS: tlsConfig, Clock: clock, JoinStates: joins,
		TaskKeys:     taskKeys,
		ServiceRoots: serviceRoots,
		Limits:       s.cfg.Limits(),
	})
	if err != nil {
		return fmt.Errorf("build stream server: %w", err)
	}
	s.facts = facts.New(facts.Deps{
		Logger: b.Logger, DB: b.DB, Replica: facts.Replica{ID: b.ReplicaID, Address: address}, Wake: b.Wake.Notify,
		Counts: s.roster.Counts, OnTime: clock.Set, ForgetAfter: s.cfg.ForgetAfter,
	})
	events.to = s.facts
	if s.lis, err = (&net.ListenConfig{}).Listen(ctx, "tcp", s.cfg.AgentListen); err != nil {
		return fmt.Errorf("listen for agents: %w", err)
	}
	b.Health.Ready("authority", func(context.Context) error { return view.Health() })
	b.Health.Ready("beat", s.facts.Health)
	for name, run := range s.server.Tasks() {
		b.Add(app.Task{Name: name, Run: run})
	}
	b.Add(
		app.Task{Name: "agents", Phase: app.PhaseDrain, Run: s.serve, Stop: s.drain},
		app.Task{Name: "roster", Run: s.roster.Run},
		app.Task{Name: "authority", Run: view.Run},
		app.Task{Name: "work", Run: dispatcher.Run},
		app.Task{Name: "work-stream", Run: streamed.Run},
		app.Task{Name: "hints", Run: dispatcher.Watch},
		app.Task{Name: "reports", Run: reporter.Run},
		app.Task{Name: "facts", Phase: app.PhaseLeases, Run: s.facts.Run, Stop: s.facts.Leave},
		app.Task{Name: "policy-frames", Run: s.tellPolicy},
	)
	return nil
}

// both joins the dispatcher and the reporter into the Work of the stream server.
type both struct {
	*work.Reporter
	dispatcher *work.Dispatcher
}

// Ready marks the node of a session that may be given work.
func (b both) Ready(sess *roster.Session) { b.dispatcher.Mark(sess.Identity.NodeID) }

// nodePolicy returns the heartbeat policy for agents. The interval follows the size of the fleet, and at least two
// heartbeats fall within the time that the policy counts as silence.
func nodePolicy(p policy.Set, nodes int) *commonv1.NodePolicy {
	interval := min(session.HeartbeatInterval(nodes), max(p.HeartbeatStaleAfter()/2, 500*time.Millisecond))
	return &commonv1.NodePolicy{
		HeartbeatInterval: durationpb.New(interval), CertificateTtl: durationpb.New(p.CertificateTTL()),
		StreamMaxAge: durationpb.New(p.StreamMaxAge()), AutoRecovery: p.AutoRecovery(),
		CrashLoopRestarts: int32(p.WorkloadCrashLoopRestarts()),
	}
}

// tellPolicy sends a changed policy to connected agents.
func (s *Service) tellPolicy(ctx context.Context) error {
	sent := s.base.Policy.Current()
	for {
		// The channel is taken before the policy is sent, so that a change meanwhile ends the wait.
		now, changed := s.base.Policy.Changed()
		if !now.Equal(sent) {
			sent = now
			p := nodePolicy(now, s.roster.Open())
			frame := session.PolicyFrame(p)
			for _, sess := range s.roster.CurrentAll() {
				sess.SetInterval(p.GetHeartbeatInterval().AsDuration())
				sess.Send(frame)
			}
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil
		}
	}
}

func (s *Service) serve(ctx context.Context) error {
	stopped := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(stopped)
		s.server.Stop()
	})
	err := s.server.Serve(s.lis)
	if !stop() {
		<-stopped
		return nil // Stop ends Serve
	}
	s.server.Stop()
	return errors.Join(errors.New("the agents' port closed"), err)
}

func (s *Service) drain(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.DrainTimeout)
	defer cancel()
	s.server.Drain(ctx, s.cfg.DrainSpread)
	return nil
}

// Run serves until ctx ends, then asks the agents to connect to another replica and stops in order.
func (s *Service) Run(ctx context.Context) error { return s.base.Run(ctx) }

// AgentAddr returns the address at which agents connect.
func (s *Service) AgentAddr() string { return s.lis.Addr().String() }

// Addr returns the address of the internal port, which other services call.
func (s *Service) Addr() string { return s.internal.Addr().String() }

// OpsAddr returns the address at which metrics and health are served.
func (s *Service) OpsAddr() string { return s.base.OpsAddr() }

// ReplicaID of this replica.
func (s *Service) ReplicaID() string { return s.base.ReplicaID }

// advertised returns the address at which other services reach this replica: the configured one, else the one it
// listens at, with the host's name if it listens on every address.
func advertised(configured, listens string) (string, error) {
	if configured != "" {
		return configured, nil
	}
	host, port, err := net.SplitHostPort(listens)
	if err != nil {
		return "", fmt.Errorf("read address of internal port: %w", err)
	}
	if ip := net.ParseIP(host); host == "" || ip.IsUnspecified() {
		if host, err = os.Hostname(); err != nil {
			return "", fmt.Errorf("read name of host: %w", err)
		}
	}
	return net.JoinHostPort(host, port), nil
}
