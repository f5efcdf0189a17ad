package findings

import (
	"context"
	"fmt"
	"log/slog"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/findings/finding"
)

// A source is gone if this process does not run it and nothing was seen by it for Config.GoneAfter: its placement was
// taken out of the configuration, or its build had a detector that later ones have not. Another replica may run a
// source that this one does not, while replicas are replaced; and a source that this process runs may fail for long,
// which concludes nothing.

var forgetGone = pg.Define(pg.RoleLifecycle, "findings.forget_gone",
	`DELETE FROM lifecycle.suspicion s
		WHERE NOT s.source = ANY ($1::text[]) AND s.seen_at <= mesh.clock() - make_interval(secs => $2)`)

var openOfGone = pg.Define(pg.RoleLifecycle, "findings.open_of_gone",
	`SELECT `+finding.Columns+` FROM lifecycle.finding f
		WHERE f.resolved_at IS NULL AND NOT f.source = ANY ($1::text[])
			AND f.last_seen_at <= mesh.clock() - make_interval(secs => $2)
			AND NOT EXISTS (SELECT 1 FROM lifecycle.suspicion s WHERE s.kind = f.kind AND s.subject_type = f.subject_type
				AND s.subject_id = f.subject_id AND s.source = f.source)
		ORDER BY f.finding_id FOR UPDATE`)

// endGone deletes the suspicions of sources that are gone, and resolves their findings or hands them over. It does
// nothing if this process runs all sources of the list.
func (s *Sweeper) endGone(ctx context.Context, standing []string, total *Swept) error {
	if !slices.ContainsFunc(standing, func(source string) bool { return !slices.Contains(s.sources, source) }) {
		return nil
	}
	resolved := 0
	err := pg.InTx(ctx, s.deps.DB, func(ctx context.Context, tx pgx.Tx) error {
		if _, err := pg.Exec(ctx, tx, finding.TakeTurn); err != nil {
			return fmt.Errorf("wait for turn: %w", err)
		}
		if _, err := pg.Exec(ctx, tx, forgetGone, s.sources, s.cfg.GoneAfter.Seconds()); err != nil {
			return fmt.Errorf("forget suspicions: %w", err)
		}
		have, err := finding.All(ctx, tx, openOfGone, s.sources, s.cfg.GoneAfter.Seconds())
		if err != nil {
			return fmt.Errorf("read open findings: %w", err)
		}
		resolved, err = s.end(ctx, tx, have)
		return err
	})
	if err != nil {
		return fmt.Errorf("end findings of detectors that are gone: %w", err)
	}
	if resolved > 0 {
		s.deps.Committed()
		s.deps.Logger.InfoContext(ctx, "findings are over whose detectors no replica runs any more",
			slog.Int("findings", resolved))
	}
	total.Resolved += resolved
	return nil
}
