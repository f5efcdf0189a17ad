package nodeapi

import (
	"context"
	"fmt"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1/lifecyclev1connect"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/gen/gpuaas/node/v1/nodev1connect"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/gen/gpuaas/recovery/v1/recoveryv1connect"
	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/joinstate"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/services/nodeapi/authority"
	"github.com/gpuaas/mesh/services/nodeapi/beat"
	"github.com/gpuaas/mesh/services/nodeapi/facts"
	"github.com/gpuaas/mesh/services/nodeapi/ingress"
	"github.com/gpuaas/mesh/services/nodeapi/relay"
	"github.com/gpuaas/mesh/services/nodeapi/roster"
	"github.com/gpuaas/mesh/services/nodeapi/session"
	"github.com/gpuaas/mesh/services/nodeapi/session/skew"
	"github.com/gpuaas/mesh/services/nodeapi/work"
)

// build makes the parts of the service, each from those above it: here alone they meet.
func (s *Service) build(ctx context.Context) error {
	b := s.base
	peers, err := s.dial()
	if err != nil {
		return err
	}
	clock := &skew.Clock{}
	s.facts = facts.New(facts.Deps{
		Logger: b.Logger, DB: b.DB, Wake: b.Wake.Notify, ForgetAfter: s.cfg.ForgetAfter,
	})
	s.roster = roster.New(b.Logger, roster.Config{
		ReplicaID: b.ReplicaID, Offset: clock.Offset,
		StaleAfter: func() time.Duration { return b.Policy.Current().HeartbeatStaleAfter() },
	}, s.facts)
	m, err := newMetrics(b.Registry.ForService(b.Name), func() float64 { return float64(s.roster.Open()) })
	if err != nil {
		return err
	}
	marks := work.NewMarks(s.roster)
	view := authority.New(b.Logger, authority.Config{ReplicaID: b.ReplicaID, RetiredFor: s.cfg.RetiredFor},
		func(ctx context.Context) (authority.Stream, error) { return peers.recovery.WatchAuthority(ctx) },
		func(n *recoveryv1.NodeAuthority) {
			s.roster.OnAuthority(n)
			marks.Mark(n.GetNodeId())
			s.server.Decided(n) // the view runs after the server was made
		})
	offers := work.NewOffers(s.roster, view, m)
	streamed := work.NewStream(b.Logger, peers.tasks,
		func(ctx context.Context) (work.Connection, error) { return peers.tasks.StreamWork(ctx) }, offers.Offer)
	dispatcher := work.NewDispatcher(b.Logger, b.ReplicaID, s.roster, view, marks, offers, streamed,
		func(ctx context.Context, replica string) (work.Hints, error) {
			return peers.tasks.WatchWork(ctx, &lifecyclev1.WatchWorkRequest{ReplicaId: replica})
		})
	reporter := work.NewReporter(b.Logger, b.ReplicaID, view, streamed, m)
	outputs := s.relay(view)
	rejections := ingress.New(ingress.Deps{
		Logger: b.Logger, DB: b.DB, ReplicaID: b.ReplicaID, TrustDomain: b.Config.TrustDomain, Wake: b.Wake.Notify,
		Metrics: m, Now: clock.Now, Known: func(nodeID string) bool { return view.Get(nodeID) != nil },
	})
	keys := agentKeys{tasks: &session.KeyList{}, roots: &session.RootList{}}
	// Before a port is open, since this waits for the database.
	if keys.joins, err = s.openKeys(ctx, keys.tasks, keys.roots); err != nil {
		return err
	}
	address, err := s.serveInternal(ctx, outputs)
	if err != nil {
		return err
	}
	s.advertise = address
	beats := beat.New(beat.Deps{
		Logger: b.Logger, DB: b.DB, ReplicaID: b.ReplicaID, Address: address, Wake: b.Wake.Notify, Counts: s.roster.Counts,
		Crowded: func() bool { return s.server.Crowded() }, // the server is made before the first beat
		Back:    s.roster.Repeat, OnTime: clock.Set, Trust: s.trust,
	})
	if err := s.serveAgents(ctx, clock, keys, session.Deps{
		Logger: b.Logger, Roster: s.roster, View: view, Work: sessionWork{reporter, marks}, Metrics: m,
		Authority: peers.recovery, Gate: peers.gates,
		Observe: func(sess *roster.Session, o *nodev1.Observation) {
			s.facts.Observed(sess.Identity.NodeID, sess.InstanceID(), sess.Generation(), o)
		},
		Output: func(sess *roster.Session, chunk *nodev1.OutputChunk) { outputs.Chunk(sess.Identity.NodeID, chunk) },
		Gone: func(sess *roster.Session) {
			outputs.Gone(sess.Identity.NodeID, sess)
			streamed.Ended(sess.Identity.NodeID, sess.ID)
		},
		Diagnose: func(sess *roster.Session, d []*commonv1.Diagnostic) {
			if fact := sess.Diagnosed(d); fact != nil {
				s.facts.Session(fact, sess.Correlation())
			}
		},
		Host: func(sess *roster.Session, host *commonv1.HostFacts) {
			s.facts.Session(sess.HostChanged(host), sess.Correlation())
		},
		Profile: func(sess *roster.Session) { s.facts.Session(sess.ProfileChanged(), sess.Correlation()) },
		Clock: func(sess *roster.Session, by time.Duration) {
			s.facts.Session(sess.ClockChanged(by), sess.Correlation())
		},
		Rejected: rejections.Refused,
		Policy:   func() *commonv1.NodePolicy { return nodePolicy(b.Policy.Current(), s.roster.Open()) },
	}); err != nil {
		return err
	}
	view.OnProfiles(s.server.Profiles)
	s.issuers.fresh = view.WaitFresh
	view.OnIssuers(s.issuers.set)
	b.Health.Ready("authority", func(context.Context) error { return view.Health() })
	b.Health.Ready("beat", beats.Health)
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
		app.Task{Name: "beats", Phase: app.PhaseLeases, Run: beats.Run},
		app.Task{
			Name: "facts", Phase: app.PhaseLeases, Run: s.facts.Run, Stop: func(ctx context.Context) error {
				s.facts.Leave(ctx) // before the beat by which the others learn that this replica leaves
				beats.Leave(ctx)
				return nil
			},
		},
		app.Task{Name: "ingress-rejections", Run: rejections.Run},
		app.Task{Name: "policy-frames", Run: s.sendPolicy},
	)
	return nil
}

// peers are the services that nodeapi calls.
type peers struct {
	recovery recoveryv1connect.SessionServiceClient
	tasks    lifecyclev1connect.TaskServiceClient
	gates    lifecyclev1connect.GateServiceClient
}

func (s *Service) dial() (*peers, error) {
	rc, err := s.base.Peer("recovery", s.cfg.Peers.Recovery, nil)
	if err != nil {
		return nil, err
	}
	lc, err := s.base.Peer("lifecycle", s.cfg.Peers.Lifecycle, nil)
	if err != nil {
		return nil, err
	}
	return &peers{
		recovery: recoveryv1connect.NewSessionServiceClient(rc.HTTP, rc.BaseURL, rc.Options...),
		tasks:    lifecyclev1connect.NewTaskServiceClient(lc.HTTP, lc.BaseURL, lc.Options...),
		gates:    lifecyclev1connect.NewGateServiceClient(lc.HTTP, lc.BaseURL, lc.Options...),
	}, nil
}

// relay returns what passes requests of other services to the sessions that may be given work.
func (s *Service) relay(view *authority.View) *relay.Relay {
	return relay.New(relay.Deps{Logger: s.base.Logger, Session: func(nodeID string) relay.Session {
		sess := s.roster.Current(nodeID)
		if sess == nil || !view.MayDispatch(nodeID, sess.ID, sess.Generation()) {
			return nil
		}
		return sess
	}})
}

// serveInternal opens the internal port, and returns the address at which other services reach it.
func (s *Service) serveInternal(ctx context.Context, outputs *relay.Relay) (string, error) {
	var err error
	if s.internal, err = s.base.InternalServer(ctx, nil); err != nil {
		return "", err
	}
	if err := s.internal.Mount(nodev1connect.NewRelayServiceHandler(outputs, s.internal.HandlerOptions()...)); err != nil {
		return "", fmt.Errorf("mount services: %w", err)
	}
	return advertised(s.cfg.Advertise, s.internal.Addr().String())
}

// agentKeys are what proves sessions, and what agents are sent to verify tasks and services.
type agentKeys struct {
	joins *joinstate.Verifier // nil: without a file of join state keys
	tasks *session.KeyList
	roots *session.RootList
}

// serveAgents makes the server of the agents' port.
func (s *Service) serveAgents(ctx context.Context, clock *skew.Clock, keys agentKeys, deps session.Deps) error {
	b := s.base
	nodes, err := pki.LoadBundle(s.cfg.NodeCAFile)
	if err != nil {
		return fmt.Errorf("load nodes' issuer: %w", err)
	}
	b.Watch(nodes)
	s.issuers = &issuers{logger: b.Logger, bundle: nodes}
	tlsConfig, err := pki.ServerTLS(pki.ServerConfig{
		Store: b.Store, TrustDomain: b.Config.TrustDomain, NextProtos: []string{"h2"}, Time: clock.Now,
		Clients: []pki.Trust{{Kind: pki.KindNode, Bundle: nodes}},
	})
	if err != nil {
		return fmt.Errorf("build agents' TLS: %w", err)
	}
	s.server, err = session.New(deps, session.Config{
		ReplicaID: b.ReplicaID, TrustDomain: b.Config.TrustDomain, TLS: tlsConfig, Clock: clock, JoinStates: keys.joins,
		TaskKeys: keys.tasks, ServiceRoots: keys.roots, Limits: s.cfg.Limits(),
	})
	if err != nil {
		return fmt.Errorf("build stream server: %w", err)
	}
	s.port, err = openPort(ctx, s.cfg.AgentListen)
	return err
}

// sessionWork is the Work of the stream server: reports, and nodes that may be given work.
type sessionWork struct {
	*work.Reporter
	marks *work.Marks
}

// Ready marks the node of a session that may be given work.
func (w sessionWork) Ready(sess *roster.Session) { w.marks.Mark(sess.Identity.NodeID) }
