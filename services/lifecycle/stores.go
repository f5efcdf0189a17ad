package lifecycle

import (
	"context"
	"errors"
	"fmt"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/lock"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/secretenv"
	"github.com/gpuaas/mesh/services/lifecycle/placement"
	"github.com/gpuaas/mesh/services/lifecycle/placement/process"
	"github.com/gpuaas/mesh/services/lifecycle/placement/static"
)

// material has the secrets and keys that the service reads from files.
type material struct {
	signingKeys

	secret []byte
	values *secretenv.Keys
}

func (s *Service) material(ctx context.Context) (material, error) {
	var m material
	if err := m.open(ctx, s.base, s.cfg); err != nil {
		return m, err
	}
	secret, err := s.cfg.SecretFile.Read()
	if err != nil {
		return m, fmt.Errorf("read secret: %w", err)
	}
	if len(secret.Reveal()) < 32 {
		return m, errors.New("read secret: it is shorter than 32 characters")
	}
	m.secret = []byte(secret.Reveal())
	m.values, err = workloadSecrets(s.cfg)
	return m, err
}

func workloadSecrets(cfg Config) (*secretenv.Keys, error) {
	keys, err := secretenv.Load(cfg.WorkloadSecretsKeysFile)
	if err != nil {
		return nil, fmt.Errorf("read workload_secrets_keys_file: %w", err)
	}
	return keys, nil
}

// openStores opens the stores that lifecycle uses beside its own database.
func (s *Service) openStores(ctx context.Context) error {
	url, err := s.cfg.WorkloadDatabaseURL.Read()
	if err != nil {
		return fmt.Errorf("read workload database url: %w", err)
	}
	s.workloads, err = pg.Open(ctx,
		pg.Config{URL: url.Reveal(), ApplicationName: "gpuaas-lifecycle-workloads", MaxConns: 4})
	if err != nil {
		return fmt.Errorf("open workload database: %w", err)
	}
	return nil
}

// lockStore returns the lock store that makes joins fast; nil if none is configured.
func (s *Service) lockStore() (*lock.Lock, error) {
	if s.cfg.RedisURLFile == "" {
		return nil, nil
	}
	url, err := s.cfg.RedisURLFile.Read()
	if err != nil {
		return nil, fmt.Errorf("read redis url: %w", err)
	}
	if s.redis, err = lock.Dial(url.Reveal(), lock.Config{}); err != nil {
		return nil, fmt.Errorf("open lock store: %w", err)
	}
	l, err := lock.New(lock.Deps{Client: s.redis, Logger: s.base.Logger, Metrics: s.base.Registry.ForService(s.base.Name)},
		lock.Config{})
	if err != nil {
		return nil, fmt.Errorf("open lock store: %w", err)
	}
	return l, nil
}

func (s *Service) drivers() (map[commonv1.PlacementDriver]placement.Driver, error) {
	out := map[commonv1.PlacementDriver]placement.Driver{
		commonv1.PlacementDriver_PLACEMENT_DRIVER_STATIC: static.New(s.base.DB),
	}
	if s.cfg.Placement.Process.Dir == "" {
		return out, nil
	}
	var err error
	if s.instances, err = process.New(s.base.Logger, s.cfg.Placement.Process); err != nil {
		return nil, fmt.Errorf("build process placement: %w", err)
	}
	out[commonv1.PlacementDriver_PLACEMENT_DRIVER_PROCESS] = s.instances
	return out, nil
}
