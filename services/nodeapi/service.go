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
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/internal/replicas"
	"github.com/gpuaas/mesh/internal/rpc/port"
	"github.com/gpuaas/mesh/internal/service"
	"github.com/gpuaas/mesh/services/nodeapi/facts"
	"github.com/gpuaas/mesh/services/nodeapi/roster"
	"github.com/gpuaas/mesh/services/nodeapi/session"
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
	port   *agentPort
	server *session.Server
	roster *roster.Roster
	facts  *facts.Writer
	// internal serves the calls of other services.
	internal *port.Server
	// issuers are the authorities of agents' certificates.
	issuers *issuers
	// advertise is where other services reach this replica.
	advertise string
}

// New builds a replica. It serves nothing before Run, and opens the port for agents when it can serve them.
func New(ctx context.Context, deps Deps, cfg Config) (*Service, error) {
	base, err := service.New(ctx, deps.Logger, deps.Registry, "nodeapi", cfg.Config, service.WithNumbering(deps.Numbering))
	if err != nil {
		return nil, err
	}
	s := &Service{base: base, cfg: cfg}
	if err := s.build(ctx); err != nil {
		s.port.close()
		if s.internal != nil {
			_ = s.internal.Close()
		}
		base.Close()
		return nil, fmt.Errorf("build nodeapi: %w", err)
	}
	return s, nil
}

// nodePolicy returns the heartbeat policy for agents. The interval follows the size of the fleet, and at least two
// heartbeats fall within the time that the policy counts as silence.
func nodePolicy(p policy.Set, nodes int) *commonv1.NodePolicy {
	interval := min(session.HeartbeatInterval(nodes), max(p.HeartbeatStaleAfter()/2, 500*time.Millisecond))
	return &commonv1.NodePolicy{
		HeartbeatInterval: durationpb.New(interval), CertificateTtl: durationpb.New(p.CertificateTTL()),
		StreamMaxAge: durationpb.New(p.StreamMaxAge()), AutoRecovery: p.AutoRecovery(),
		CrashLoopRestarts: int32(p.WorkloadCrashLoopRestarts()), RecoveryAttemptsPerHour: int32(p.RecoveryAttemptsPerHour()),
		TrustDwell: durationpb.New(p.TrustDwell()),
	}
}

// sendPolicy sends a changed policy to connected agents.
func (s *Service) sendPolicy(ctx context.Context) error {
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
	s.issuers.wait(ctx)
	err := s.port.listen(ctx)
	if err == nil {
		err = s.server.Serve(s.port.lis)
	}
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
func (s *Service) AgentAddr() string { return s.port.addr.String() }

// Addr returns the address of the internal port, which other services call.
func (s *Service) Addr() string { return s.internal.Addr().String() }

// OpsAddr returns the address at which metrics and health are served.
func (s *Service) OpsAddr() string { return s.base.OpsAddr() }

// ReplicaID returns the id of this replica.
func (s *Service) ReplicaID() string { return s.base.ReplicaID }

// trust returns what the agents' port trusts, and the address of this replica alone at which agents could reach it: the
// port that it listens at, on the host at which other services reach it.
func (s *Service) trust() replicas.Trust {
	out := replicas.Trust{ClientCAs: s.issuers.bundle.Fingerprints()}
	host, port, err := net.SplitHostPort(s.port.addr.String())
	if err != nil {
		return out
	}
	if ip := net.ParseIP(host); host == "" || ip.IsUnspecified() {
		if host, _, err = net.SplitHostPort(s.advertise); err != nil {
			return out
		}
	}
	out.AgentAddress = net.JoinHostPort(host, port)
	return out
}

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
