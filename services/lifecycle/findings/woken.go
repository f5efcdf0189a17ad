package findings

import (
	"context"
	"fmt"

	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/findings/detect"
	"github.com/gpuaas/mesh/services/lifecycle/findings/finding"
)

// wokenSource is the source of findings on instances of ended epochs that were started again.
const wokenSource = "woken"

// wokenState is whether a sweep for instances that were started again has anything to do.
type wokenState struct {
	Refused  bool `db:"refused"`  // a refusal is kept
	Standing bool `db:"standing"` // there is a suspicion or an open finding
}

var readWokenState = pg.Define(pg.RoleLifecycle, "findings.read_woken_state",
	`SELECT EXISTS (SELECT 1 FROM lifecycle.woken_instance) AS refused,
		EXISTS (SELECT 1 FROM lifecycle.finding f WHERE f.resolved_at IS NULL AND f.kind = $1 AND f.source = $2)
		OR EXISTS (SELECT 1 FROM lifecycle.suspicion s WHERE s.kind = $1 AND s.source = $2) AS standing`)

// SweepWoken makes findings of the instances that were refused within the last hour, ends those of others, and forgets
// old refusals. It is a sweep of its own: it compares nothing, and its finding must not wait for the sweeps that do.
func (s *Sweeper) SweepWoken(ctx context.Context) (Swept, error) {
	var total Swept
	var seen []finding.Seen
	state, err := pg.One[wokenState](ctx, s.deps.DB, readWokenState, names.Of(detect.EndedWoke), wokenSource)
	if err == nil && state.Refused {
		seen, err = s.detect.Woken(ctx)
	}
	if err == nil && (state.Standing || len(seen) > 0) {
		err = s.applyScan(ctx, wokenSource, seen, &total)
	}
	if err == nil && state.Refused {
		err = s.detect.ForgetRefused(ctx)
	}
	if err != nil {
		s.failed.WithLabelValues(wokenSource).Inc()
		return total, fmt.Errorf("look at refused instances: %w", err)
	}
	return total, nil
}
