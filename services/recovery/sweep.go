package recovery

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/background"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/services/recovery/actions"
	"github.com/gpuaas/mesh/services/recovery/fleet"
	"github.com/gpuaas/mesh/services/recovery/keys"
	"github.com/gpuaas/mesh/services/recovery/storage"
)

// addBackground adds the service's periodic work.
func (s *Service) addBackground(ctx context.Context) error {
	b := s.base
	deps := background.Deps{Pool: b.DB, Logger: b.Logger, Registerer: b.Registry.ForService(b.Name)}
	ends := slices.Clone(cuts)
	var more []background.Job
	if s.castore != nil {
		ends = append(ends, s.castore.Cuts()...)
		more = append(more, s.castore.Job(b.Config.RetentionSweep))
	}
	walk, err := b.Retention(ctx, ends...)
	if err != nil {
		return err
	}
	sweeps, err := background.New(deps, slices.Concat(more, []background.Job{walk}, s.jobs(deps))...)
	if err != nil {
		return err
	}
	b.Add(app.Task{Name: "background", Run: sweeps.Run})
	return nil
}

// jobs are the sweeps over rows of this service.
func (s *Service) jobs(deps background.Deps) []background.Job {
	wake, every := s.base.Wake, s.cfg.SweepEvery
	room := storage.Watch{DB: deps.Pool, Policy: s.base.Policy, Volume: s.cfg.DatabaseVolume}
	return []background.Job{
		{Name: "enrolments", Every: every, Timeout: time.Minute, Run: func(ctx context.Context) error {
			swept, err := s.enroller.Sweep(ctx)
			if err != nil {
				return fmt.Errorf("sweep enrolments: %w", err)
			}
			if swept.Tokens+swept.Claims+swept.Sessions > 0 {
				deps.Logger.DebugContext(ctx, "enrolments swept", slog.Int64("tokens", swept.Tokens),
					slog.Int64("claims", swept.Claims),
					slog.Int64("sessions", swept.Sessions))
			}
			return nil
		}},
		{Name: "storage", Every: storage.Every, Timeout: time.Minute, Run: func(ctx context.Context) error {
			changed, err := room.Measure(ctx)
			if changed {
				wake.Notify()
			}
			return err
		}},
		{
			Name: "fleet-counts", Every: fleet.CompareEvery, Timeout: time.Minute,
			Run: func(ctx context.Context) error {
				found, err := fleet.RepairCounts(ctx, deps.Pool, deps.Logger)
				if err == nil && found.Placements+found.Machines > 0 {
					wake.Notify()
				}
				return err
			},
		},
		{
			Name: "overdue-identities", Every: fleet.OverdueEvery, Timeout: time.Minute,
			Run: func(ctx context.Context) error {
				noting, appended := events.Noting(ctx)
				err := fleet.EvaluateOverdue(noting, deps.Pool, deps.Logger, s.base.Policy.Current())
				if appended() {
					wake.Notify()
				}
				return err
			},
		},
		{Name: "recovery-actions", Every: every, Timeout: time.Minute, Run: func(ctx context.Context) error {
			failed, err := actions.Sweep(ctx, deps.Pool)
			if failed > 0 {
				wake.Notify()
			}
			return err
		}},
		{Name: "key-incidents", Every: every, Timeout: time.Minute, Run: func(ctx context.Context) error {
			changed, err := keys.Sweep(ctx, deps.Pool)
			if changed {
				wake.Notify()
			}
			return err
		}},
	}
}
