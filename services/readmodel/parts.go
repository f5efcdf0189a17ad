package readmodel

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/background"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/service"
	"github.com/gpuaas/mesh/services/readmodel/auditlog"
	"github.com/gpuaas/mesh/services/readmodel/notify"
	"github.com/gpuaas/mesh/services/readmodel/project"
	"github.com/gpuaas/mesh/services/readmodel/watch"
)

// checkHosts returns an error if the certificate is not valid for a host of people_hosts, because people's clients
// would refuse it.
func (s *Service) checkHosts(context.Context) error {
	leaf := s.base.Store.Certificate().Leaf
	var errs []error
	for _, host := range s.cfg.PeopleHosts {
		if err := leaf.VerifyHostname(host); err != nil {
			errs = append(errs, fmt.Errorf("people_hosts: the service certificate is not good for %s: %w", host, err))
		}
	}
	return errors.Join(errs...)
}

func (s *Service) addProjector(context.Context) error {
	b := s.base
	var err error
	s.projector, err = project.New(project.Deps{
		Logger: b.Logger, DB: b.DB, Numbered: b.Numbered, Wake: b.Wake, Registerer: b.Registry.ForService(b.Name),
	})
	if err != nil {
		return err
	}
	b.Consumes(project.ConsumerName)
	b.Add(
		app.Task{Name: "projections", Run: s.projector.Run},
		app.Task{Name: "projection-lag", Run: s.projector.Measure},
	)
	return nil
}

func (s *Service) addAudit(context.Context) error {
	b := s.base
	var err error
	s.audit, err = auditlog.New(auditlog.Deps{Logger: b.Logger, DB: b.DB, Numbered: b.Numbered, Wake: b.Wake})
	if err != nil {
		return err
	}
	b.Consumes(auditlog.ConsumerName)
	b.Add(app.Task{Name: "audit-log", Run: s.audit.Run})
	return nil
}

func (s *Service) addWatches(context.Context) error {
	b := s.base
	var err error
	s.hub, err = watch.New(watch.Deps{
		Logger: b.Logger, DB: b.DB, Reader: s.reader, Advanced: s.projector.Advanced,
		Registerer: b.Registry.ForService(b.Name),
	}, watch.Config{Limits: s.cfg.watchLimits()})
	if err != nil {
		return err
	}
	b.Add(app.Task{Name: "watches", Run: s.hub.Run})
	return nil
}

func (s *Service) addNotifications(context.Context) error {
	b := s.base
	notifier, err := notify.New(notify.Deps{
		Logger: b.Logger, DB: b.DB, Reader: s.reader, Queued: s.projector.Queued,
		Registerer: b.Registry.ForService(b.Name),
		Window:     func() time.Duration { return b.Policy.Current().AuditDedupeWindow() },
	})
	if err != nil {
		return err
	}
	b.Add(app.Task{Name: "notifications", Run: notifier.Run})
	return nil
}

func (s *Service) addBackground(ctx context.Context) error {
	b := s.base
	walk, err := b.Retention(ctx, cuts...)
	if err != nil {
		return err
	}
	sweeps, err := background.New(
		background.Deps{Pool: b.DB, Logger: b.Logger, Registerer: b.Registry.ForService(b.Name)},
		background.Job{Name: "audit-checkpoint", Every: walk.Every, Timeout: time.Minute, Run: s.audit.Checkpoint},
		background.Job{Name: "dead-rebuilds", Every: time.Hour, Timeout: time.Minute, Run: s.projector.DropDeadRebuilds},
		walk)
	if err != nil {
		return err
	}
	// Only a restore can undo a migration, so this is checked seldom.
	b.Health.Ready("migrations", service.Seldom(10*time.Second,
		func(ctx context.Context) error { return pg.CheckMigrated(ctx, b.DB) }))
	b.Add(app.Task{Name: "background", Run: sweeps.Run})
	return nil
}
