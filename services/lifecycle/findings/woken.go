package findings

import (
	"context"
	"fmt"

	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/findings/detect"
)

// wokenSource is the source of findings on instances of ended epochs that were started again.
const wokenSource = "woken"

var noWokenFinding = pg.Define(pg.RoleLifecycle, "findings.no_woken_finding",
	`SELECT NOT EXISTS (SELECT 1 FROM lifecycle.finding f WHERE f.resolved_at IS NULL AND f.kind = $1 AND f.source = $2)
		AND NOT EXISTS (SELECT 1 FROM lifecycle.suspicion s WHERE s.kind = $1 AND s.source = $2)`)

// SweepWoken makes findings of the instances that were refused within the last hour, ends those of others, and forgets
// old refusals. It is a sweep of its own: it compares nothing, and its finding must not wait for the sweeps that do.
func (s *Sweeper) SweepWoken(ctx context.Context) (Swept, error) {
	var total Swept
	seen, err := s.detect.Woken(ctx)
	if err == nil && len(seen) == 0 {
		idle := false
		err = pg.QueryRow(ctx, s.deps.DB, noWokenFinding, names.Of(detect.EndedWoke), wokenSource).Scan(&idle)
		if err == nil && idle {
			return total, nil
		}
	}
	if err == nil {
		err = s.settle(ctx, wokenSource, seen, &total)
	}
	if err == nil {
		err = s.detect.ForgetRefused(ctx)
	}
	if err != nil {
		s.failed.WithLabelValues(wokenSource).Inc()
		return total, fmt.Errorf("look at refused instances: %w", err)
	}
	return total, nil
}
