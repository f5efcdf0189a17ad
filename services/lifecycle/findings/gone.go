package findings

import (
	"context"
	"fmt"
	"log/slog"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/findings/finding"
	"github.com/gpuaas/mesh/services/lifecycle/findings/scan"
)

// A source is gone if this process does not run it and nothing was seen by it for Config.GoneAfter: its placement was
// taken out of the configuration, or its build had a detector that later ones have not. Another replica may run a
// source that this one does not, while replicas are replaced; and a source that this process runs may fail for long,
// which concludes nothing.

var forgetGone = pg.Define(pg.RoleLifecycle, "findings.forget_gone", `
	DELETE FROM lifecycle.suspicion s USING (
		SELECT o.kind, o.subject_type, o.subject_id, o.source FROM lifecycle.suspicion o
		WHERE NOT o.source = ANY ($1::text[]) AND o.seen_at <= mesh.clock() - make_interval(secs => $2)
		ORDER BY o.kind, o.subject_type, o.subject_id, o.source LIMIT $3) AS x
	WHERE s.kind = x.kind AND s.subject_type = x.subject_type AND s.subject_id = x.subject_id AND s.source = x.source`)

// openOfGone reads a page of findings. Their rows are not written by each scan: when a finding was last seen is in the
// suspicion of its source.
var openOfGone = pg.Define(pg.RoleLifecycle, "findings.open_of_gone",
	`SELECT `+finding.Columns+` FROM lifecycle.finding f
		WHERE f.resolved_at IS NULL AND NOT f.source = ANY ($1::text[]) AND f.finding_id > $3::uuid
			AND f.last_seen_at <= mesh.clock() - make_interval(secs => $2)
			AND NOT EXISTS (SELECT 1 FROM lifecycle.suspicion s WHERE s.kind = f.kind AND s.subject_type = f.subject_type
				AND s.subject_id = f.subject_id AND s.source = f.source
				AND s.seen_at > mesh.clock() - make_interval(secs => $2))
		ORDER BY f.finding_id LIMIT $4`)

// endGone resolves the findings of sources that are gone, or hands them over, and deletes the suspicions of these
// sources, in transactions of applyBatch. It does nothing if this process runs all sources of the list.
func (s *Sweeper) endGone(ctx context.Context, standing []string, total *Swept) error {
	if !slices.ContainsFunc(standing, func(source string) bool { return !slices.Contains(s.sources, source) }) {
		return nil
	}
	resolved := 0
	for after := scan.BeforeIDs; after != ""; {
		n, last, err := s.endPageOfGone(ctx, after)
		if err != nil {
			return fmt.Errorf("end findings of detectors that are gone: %w", err)
		}
		if n > 0 {
			s.deps.Committed()
		}
		total.Resolved += n
		resolved, after = resolved+n, last
	}
	for more := true; more; {
		err := pg.InTx(ctx, s.deps.DB, func(ctx context.Context, tx pgx.Tx) error {
			if err := pg.Queue(ctx, tx, finding.TakeTurn); err != nil {
				return fmt.Errorf("wait for turn: %w", err)
			}
			tag, err := pg.Exec(ctx, tx, forgetGone, s.sources, s.cfg.GoneAfter.Seconds(), applyBatch)
			more = tag.RowsAffected() == applyBatch
			return err
		})
		if err != nil {
			return fmt.Errorf("forget suspicions of detectors that are gone: %w", err)
		}
	}
	if resolved > 0 {
		s.deps.Logger.InfoContext(ctx, "findings are over whose detectors no replica runs any more",
			slog.Int("findings", resolved))
	}
	return nil
}

// endPageOfGone ends the findings of a page that begins after an id. It returns how many it resolved, and the last id
// of the page; "" if there is no further one.
func (s *Sweeper) endPageOfGone(ctx context.Context, after string) (int, string, error) {
	resolved, last := 0, ""
	err := pg.InTx(ctx, s.deps.DB, func(ctx context.Context, tx pgx.Tx) error {
		resolved, last = 0, ""
		if err := pg.Queue(ctx, tx, finding.TakeTurn); err != nil {
			return fmt.Errorf("wait for turn: %w", err)
		}
		page, err := pg.All[finding.Stored](ctx, tx, openOfGone, s.sources, s.cfg.GoneAfter.Seconds(), after, applyBatch)
		if err != nil {
			return fmt.Errorf("read open findings: %w", err)
		}
		if len(page) == applyBatch {
			last = page[len(page)-1].ID
		}
		rows, err := finding.Parse(ctx, page)
		if err != nil {
			return err
		}
		over := make([]string, len(rows))
		for i := range rows {
			over[i] = rows[i].ID
		}
		resolved, err = s.end(ctx, tx, over)
		return err
	})
	return resolved, last, err
}
