package recovery

import (
	"context"
	"fmt"
	"log/slog"

	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pki/ca"
	"github.com/gpuaas/mesh/services/recovery/castore"
	"github.com/gpuaas/mesh/services/recovery/trust/signing"
)

// openAuthority opens the authority that the configuration names, unless there is one already, and notes what it signs.
func (s *Service) openAuthority(ctx context.Context) error {
	if s.signer == nil {
		if err := s.openSigner(ctx); err != nil {
			return err
		}
	}
	s.witness = &ca.Witness{Signer: s.signer}
	if rotating, ok := s.signer.(ca.Rotating); ok {
		s.witness.Signer = signing.Follow(s.base.DB, s.base.Numbered, rotating)
	}
	s.base.Health.Watch("ca", s.witness.Check)
	return nil
}

func (s *Service) openSigner(ctx context.Context) error {
	if process := s.cfg.CAProcess; process.URL != "" {
		signer, err := ca.Dial(ca.RemoteConfig{
			URL: process.URL, RootsPath: process.RootsFile, Provisioner: process.Provisioner, ProvisionerPath: process.KeyFile,
			TrustDomain: s.base.Config.TrustDomain,
		})
		if err != nil {
			return err
		}
		s.signer, s.owned = signer, true
		return nil
	}
	cfg := ca.Config{Dir: s.cfg.CADir, TrustDomain: s.base.Config.TrustDomain, Follows: true}
	if s.cfg.CADatabaseURLFile != "" {
		secret, err := s.cfg.CADatabaseURLFile.Read()
		if err != nil {
			return fmt.Errorf("read authority's database url: %w", err)
		}
		cfg.DatabaseURL = secret.Reveal()
	}
	signer, err := ca.Open(cfg)
	if err != nil {
		return err
	}
	s.signer, s.owned = signer, true
	if cfg.DatabaseURL != "" {
		s.castore, err = castore.Open(ctx, cfg.DatabaseURL)
	}
	return err
}

func (s *Service) closeAuthority() {
	if !s.owned {
		return
	}
	s.owned = false
	if s.castore != nil {
		s.castore.Close()
	}
	if err := s.signer.Close(); err != nil {
		s.base.Logger.Warn("closing the authority failed", slog.Any(obs.KeyError, err))
	}
}
