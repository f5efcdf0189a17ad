package lifecycle

import (
	"context"
	"fmt"
	"log/slog"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/rpc/port"
	"github.com/gpuaas/mesh/internal/service"
	"github.com/gpuaas/mesh/services/lifecycle/placement/process"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
)

// Deps of the service.
type Deps struct {
	Logger   *slog.Logger
	Registry *obs.Registry
	// Numbering is shared by the services of one process; nil: the service has one of its own.
	Numbering *service.Numbering
}

// Service is one replica of lifecycle.
type Service struct {
	base      *service.Base
	cfg       Config
	server    *port.Server
	workloads *pgxpool.Pool
	redis     *redis.Client
	instances *process.Driver
}

// New builds a replica. It listens, and serves nothing before Run.
func New(ctx context.Context, deps Deps, cfg Config) (*Service, error) {
	base, err := service.New(ctx, deps.Logger, deps.Registry, "lifecycle", cfg.Config,
		service.WithPoolSettings(saga.PoolSettings()), service.WithNumbering(deps.Numbering))
	if err != nil {
		return nil, err
	}
	s := &Service{base: base, cfg: cfg}
	if err := s.build(ctx); err != nil {
		s.close()
		base.Close()
		return nil, fmt.Errorf("build lifecycle: %w", err)
	}
	return s, nil
}

// Run serves until ctx ends, then stops in order.
func (s *Service) Run(ctx context.Context) error {
	defer s.close()
	return s.base.Run(ctx)
}

func (s *Service) close() {
	if s.workloads != nil {
		s.workloads.Close()
	}
	if s.redis != nil {
		_ = s.redis.Close()
	}
}

// PowerOffInstances stops everything that runs on launched instances without ending them, for a host that goes down.
func (s *Service) PowerOffInstances(ctx context.Context) error {
	if s.instances == nil {
		return nil
	}
	return s.instances.PowerOff(ctx)
}

// Addr returns the address at which other services call.
func (s *Service) Addr() string { return s.server.Addr().String() }

// OpsAddr returns the address at which metrics and health are served.
func (s *Service) OpsAddr() string { return s.base.OpsAddr() }
