package recovery

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/gpuaas/mesh/internal/background"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/recovery/enrol"
)

// newBackground is the service's periodic work.
func newBackground(pool *pgxpool.Pool, logger *slog.Logger, enroller *enrol.Enroller, every time.Duration) (*background.Runner, error) {
	return background.New(background.Deps{Pool: pool, Schema: pg.RoleRecovery, Logger: logger}, //nolint:wrapcheck // it says what it did
		background.Job{Name: "enrolments", Every: every, Run: func(ctx context.Context) error {
			swept, err := enroller.Sweep(ctx)
			if err != nil {
				return fmt.Errorf("sweep enrolments: %w", err)
			}
			if swept.Tokens+swept.Claims+swept.Sessions > 0 {
				logger.DebugContext(ctx, "enrolments swept", slog.Int64("tokens", swept.Tokens), slog.Int64("claims", swept.Claims),
					slog.Int64("sessions", swept.Sessions))
			}
			return nil
		}})
}
