package recovery

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/gpuaas/mesh/internal/background"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/services/recovery/actions"
	"github.com/gpuaas/mesh/services/recovery/enrol"
	"github.com/gpuaas/mesh/services/recovery/fleet"
	"github.com/gpuaas/mesh/services/recovery/keys"
	"github.com/gpuaas/mesh/services/recovery/storage"
)

// newBackground is the service's periodic work.
func newBackground(deps background.Deps, enroller *enrol.Enroller, wake *events.Signal, every time.Duration,
	set policy.Reader, walk background.Job, room storage.Watch, more ...background.Job,
) (*background.Runner, error) {
	return background.New(deps, append(more, walk,
		background.Job{Name: "enrolments", Every: every, Timeout: time.Minute, Run: func(ctx context.Context) error {
			swept, err := enroller.Sweep(ctx)
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
		background.Job{Name: "storage", Every: storage.Every, Timeout: time.Minute, Run: func(ctx context.Context) error {
			told, err := room.Measure(ctx)
			if told {
				wake.Notify()
			}
			return err
		}},
		background.Job{
			Name: "fleet-counts", Every: fleet.CompareEvery, Timeout: time.Minute,
			Run: func(ctx context.Context) error {
				found, err := fleet.RepairCounts(ctx, deps.Pool, deps.Logger)
				if err == nil && found.Placements+found.Machines > 0 {
					wake.Notify()
				}
				return err
			},
		},
		background.Job{
			Name: "overdue-identities", Every: fleet.OverdueEvery, Timeout: time.Minute,
			Run: func(ctx context.Context) error {
				noting, appended := events.Noting(ctx)
				err := fleet.EvaluateOverdue(noting, deps.Pool, deps.Logger, set.Current())
				if appended() {
					wake.Notify()
				}
				return err
			},
		},
		background.Job{Name: "recovery-actions", Every: every, Timeout: time.Minute, Run: func(ctx context.Context) error {
			failed, err := actions.Sweep(ctx, deps.Pool)
			if failed > 0 {
				wake.Notify()
			}
			return err
		}},
		background.Job{Name: "key-incidents", Every: every, Timeout: time.Minute, Run: func(ctx context.Context) error {
			told, err := keys.Sweep(ctx, deps.Pool)
			if told {
				wake.Notify()
			}
			return err
		}})...)
}
